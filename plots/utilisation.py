"""What a run kept busy, and when: processors, memory and PCIe over its time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from configs.study import Figure as FigureRow
from plots.blocks import Blocks, by_look
from plots.lines import from_zero
from plots.observations import observe
from plots.tables import PlotError, Tables
from plots.units import GIB

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


_ROWS = (
    _Row("cpu_percent", "CPU (%)", over_devices="first", top=100),
    _Row("host_used_bytes", "host\nmemory (GiB)", GIB, "first"),
    _Row("gpu_util_percent", "GPU (%)", top=100),
    _Row("gpu_memory_used_bytes", "GPU\nmemory (GiB)", GIB, "sum"),
    _Row("pcie_rx_bytes_per_s", "PCIe to\nGPU (GB/s)", 1e9, "sum"),
    _Row("pcie_tx_bytes_per_s", "PCIe from\nGPU (GB/s)", 1e9, "sum"),
)
"""From above: the host, then the devices; a row that no sample knows is left out."""


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
    blocks = Blocks(_panel, row_inches=1.1, below_inches=0.5)
    return blocks.draw(tables, samples, _known(samples), notes)


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
    found = [row for row in _ROWS if row.column in samples and samples[row.column].notna().any()]
    if not found:
        raise PlotError("monitor.csv holds no sample of a processor, of memory or of PCIe")
    return found


def _panel(ax: Axes, block: pd.DataFrame, row: _Row, last: bool) -> dict[str, Any]:
    entries: dict[str, Any] = {}
    for look, samples in by_look(block):
        known = samples[samples[row.column].notna()]
        line = known.groupby("time_s")[row.column].agg(row.over_devices) / row.divisor
        line, style = _thinned(line), look.alone
        (entries[look.name],) = ax.plot(
            line.index, line.to_numpy(), color=style.colour, linestyle=style.dash,
            linewidth=style.width, marker=style.marker, markersize=3.5,
            markevery=max(1, len(line) // 10),
        )  # fmt: skip
    ax.set_ylabel(row.label)
    if row.top is None:
        from_zero(ax)
    else:
        ax.set_ylim(0, row.top)
    ax.set_xlim(0, float(block["time_s"].max()) or 1.0)
    if last:
        ax.set_xlabel("time since the start of the run (s)")
    else:
        ax.tick_params(axis="x", labelbottom=False)
    return entries


def _thinned(line: pd.Series) -> pd.Series:
    """Means over as many neighbours as leave a number of points that can be seen."""
    step = -(-len(line) // _MOST_POINTS)
    table = line.rename("value").rename_axis("time").reset_index()
    means = table.groupby(table.index // step).mean() if step > 1 else table
    return means.set_index("time")["value"]
