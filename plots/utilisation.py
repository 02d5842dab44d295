"""What a run kept busy, and when: processors, memory and PCIe over its time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from configs.study import Figure as FigureRow
from plots.blocks import Blocks, by_look
from plots.lines import from_zero
from plots.observations import observe
from plots.tables import PlotError, Tables
from plots.units import GIB

_GREY = "0.6"
_MOST_POINTS = 600
"""Of a line; more samples than a figure has pixels are averaged."""


@dataclass(frozen=True)
class _Row:
    column: str
    label: str
    divisor: float = 1.0
    over_devices: str = "mean"
    """``first`` where a sample says the same for every device."""
    top: float | None = None
    whole: str = ""
    """Column of what all on the machine hold, which is drawn in grey behind the run's own; alone
    where nothing is known of the run's."""
    whole_label: str = ""


_ROWS = (
    _Row("cpu_percent", "CPU (%)", over_devices="first", top=100),
    _Row("host_used_bytes", "host\nmemory (GiB)", GIB, "first", whole="machine_used_bytes",
         whole_label="machine's\nmemory (GiB)"),
    _Row("gpu_util_percent", "GPU (%)", top=100),
    _Row("gpu_memory_run_bytes", "GPU\nmemory (GiB)", GIB, "sum", whole="gpu_memory_used_bytes",
         whole_label="whole GPU's\nmemory (GiB)"),
    _Row("pcie_rx_bytes_per_s", "PCIe to\nGPU (GB/s)", 1e9, "sum"),
    _Row("pcie_tx_bytes_per_s", "PCIe from\nGPU (GB/s)", 1e9, "sum"),
)  # fmt: skip
"""From above: the host, then the devices; a row that no sample knows is left out."""
_WHOLE = "whole machine or device"


def draw(tables: Tables, _figure: FigureRow, *, asked: bool = True) -> list[Figure]:
    """Timelines over the run, a row a resource, engines over each other; a block a case.

    Raises:
        PlotError: ``monitor.csv`` is missing or holds no sample of anything.
    """
    del asked
    samples = _samples(tables)
    on_devices = "device_id" in samples and samples["device_id"].notna().any()
    notes = [
        "the first run of each engine, start-up included",
        "sums and means over devices" if on_devices else "",
    ]
    rows = _known(samples)
    behind = any(row.whole in samples for row in rows if row.whole)
    entries = {_WHOLE: Line2D([], [], color=_GREY)} if behind else {}
    blocks = Blocks(_panel, row_inches=1.1, below_inches=0.5, entries=entries)
    return blocks.draw(tables, samples, rows, notes)


def _samples(tables: Tables) -> pd.DataFrame:
    """Samples of the first run of each engine of a case.

    Raises:
        PlotError: there are none.
    """
    table = tables.monitor
    runs = observe(tables).runs[["path", "look", "source"]]
    rows = table.drop(columns="source", errors="ignore").merge(runs, on="path")
    rows = rows[rows["time_s"].notna()]
    if rows.empty:
        raise PlotError("monitor.csv holds no sample of a run of runs.csv")
    first = rows.drop_duplicates(["case", "look"])["path"]
    return rows[rows["path"].isin(set(first))]


def _known(samples: pd.DataFrame) -> list[_Row]:
    """Rows that some sample knows; of the whole machine where it knows no more."""
    known = {column for column in samples if samples[column].notna().any()}
    found = []
    for row in _ROWS:
        if row.column in known:
            found.append(row if row.whole in known else replace(row, whole=""))
        elif row.whole in known:
            found.append(replace(row, column=row.whole, label=row.whole_label, whole=""))
    if not found:
        raise PlotError("monitor.csv holds no sample of a processor, of memory or of PCIe")
    return found


def _panel(ax: Axes, block: pd.DataFrame, row: _Row, last: bool) -> dict[str, Any]:
    entries: dict[str, Any] = {}
    for look, samples in by_look(block):
        style = look.alone
        if row.whole:
            whole = _line(samples, row.whole, row)
            ax.plot(whole.index, whole.to_numpy(), color=_GREY, linewidth=1.2, zorder=1.5)
        line = _line(samples, row.column, row)
        (entries[look.name],) = ax.plot(
            line.index, line.to_numpy(), color=style.colour, linestyle=style.dash,
            linewidth=style.width, marker=style.marker, markersize=3.5,
            markevery=max(1, len(line) // 10),
        )  # fmt: skip
        # Where this run ends, which need not be where the longest of the panel does.
        ax.axvline(samples["time_s"].max(), color=style.colour, linewidth=0.8, zorder=1, gid="end")
    ax.set_ylabel(row.label)
    if row.top is None:
        from_zero(ax)
    else:
        ax.set_ylim(0, row.top)
    ax.set_xlim(0, float(block["time_s"].max()) or 1.0)
    ax.tick_params(axis="x", labelbottom=last)
    ax.set_xlabel("time since the start of the run (s)" if last else "")
    return entries


def _line(samples: pd.DataFrame, column: str, row: _Row) -> pd.Series:
    """Values by time; means over as many neighbours as leave points that can be seen.

    The last sample stays where it is, so that the line ends where the run does.
    """
    known = samples[samples[column].notna()]
    line = known.groupby("time_s")[column].agg(row.over_devices) / row.divisor
    step = -(-len(line) // _MOST_POINTS)
    if step <= 1:
        return line
    table = line.rename("value").reset_index()
    means = table.groupby(table.index // step).mean()
    means.loc[means.index[-1], "time_s"] = table["time_s"].iloc[-1]
    return means.set_index("time_s")["value"]
