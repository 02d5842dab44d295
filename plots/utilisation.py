"""What a run kept busy, and when: processors, memory and PCIe over its time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from plots.canvas import (
    WIDTH_INCHES,
    canvas,
    cases,
    fold,
    footnote,
    legend,
    legend_inches,
    watermark,
)
from plots.lines import from_zero
from plots.observations import observe
from plots.series import variants
from plots.style import engine_order, engine_title, sweep_style
from plots.tables import PlotError, Tables
from plots.units import GIB

_ROW_INCHES = 1.15
_MOST_CASES = 4
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


def unsupported(tables: Tables) -> str:
    """Why the figure is not worth drawing unasked; empty when it is."""
    try:
        _known(_samples(tables))
    except PlotError as error:
        return str(error)
    return ""


def draw(tables: Tables) -> Figure:
    """Timelines over the run, a row a resource, engines over each other; a block a case.

    Raises:
        PlotError: ``monitor.csv`` is missing or holds no sample of anything.
    """
    samples = _samples(tables)
    rows = _known(samples)
    every = cases(samples)
    shown = every[:_MOST_CASES]
    places = variants(samples)
    with canvas():
        count = len(shown) * len(rows)
        names = [engine_title(*key) for key in places]
        height = 0.75 + legend_inches(names) + count * _ROW_INCHES + 0.35 * len(shown)
        figure = Figure(figsize=(WIDTH_INCHES, height))
        grid = figure.subplots(count, 1, squeeze=False)[:, 0]
        entries: dict[str, Any] = {}
        for place, ax in enumerate(grid):
            case, row = shown[place // len(rows)], rows[place % len(rows)]
            block = samples[samples["case"] == case]
            entries |= _panel(ax, block, row, places)
            watermark(ax, set(block["source"]), size=14)
            ax.set_xlim(0, float(block["time_s"].max()) or 1.0)
            if row is rows[0] and case:
                ax.set_title(fold(case, 62), loc="left")
            if row is rows[-1]:
                ax.set_xlabel("time since the start of the run (s)")
            else:
                ax.tick_params(axis="x", labelbottom=False)
        figure.align_ylabels(grid)
        legend(figure, entries)
        on_devices = "device_id" in samples and samples["device_id"].notna().any()
        more = len(every) - len(shown)
        footnote(
            figure, "the first run of each engine, start-up included",
            "sums and means over devices" if on_devices else "",
            f"{more} more cases not drawn" if more else "",
            tables.provenance(set(samples["path"])),
        )  # fmt: skip
    return figure


def _samples(tables: Tables) -> pd.DataFrame:
    """Samples of the first run of each engine of a case.

    Raises:
        PlotError: there are none.
    """
    table = tables.monitor
    runs = observe(tables).runs[["path", "stride", "source"]]
    rows = table.drop(columns=["stride", "source"], errors="ignore").merge(runs, on="path")
    rows = rows[rows["time_s"].notna()]
    if rows.empty:
        raise PlotError("monitor.csv holds no sample of a run of runs.csv")
    first = rows.drop_duplicates(["case", "engine", "stride"])["path"]
    return rows[rows["path"].isin(set(first))]


def _known(samples: pd.DataFrame) -> list[_Row]:
    found = [row for row in _ROWS if row.column in samples and samples[row.column].notna().any()]
    if not found:
        raise PlotError("monitor.csv holds no sample of a processor, of memory or of PCIe")
    return found


def _panel(
    ax: Axes, block: pd.DataFrame, row: _Row, places: dict[tuple[str, float], int]
) -> dict[str, Any]:
    entries: dict[str, Any] = {}
    groups = sorted(
        block.groupby(["engine", "stride"], sort=False),
        key=lambda item: (engine_order(item[0][0]), item[0][1]),
    )
    for (engine, stride), samples in groups:
        known = samples[samples[row.column].notna()]
        line = known.groupby("time_s")[row.column].agg(row.over_devices) / row.divisor
        line = _thinned(line)
        style = sweep_style(engine, places[engine, stride])
        (entries[engine_title(engine, stride)],) = ax.plot(
            line.index, line.to_numpy(), color=style.colour, linestyle=style.dash,
            linewidth=style.width, marker=style.marker, markersize=3.5,
            markevery=max(1, len(line) // 10),
        )  # fmt: skip
    ax.set_ylabel(row.label)
    if row.top is None:
        from_zero(ax)
    else:
        ax.set_ylim(0, row.top)
    return entries


def _thinned(line: pd.Series) -> pd.Series:
    """Means over as many neighbours as leave a number of points that can be seen."""
    step = -(-len(line) // _MOST_POINTS)
    if step <= 1:
        return line
    block = [place // step for place in range(len(line))]
    times = line.index.to_series().groupby(block).mean()
    return pd.Series(line.groupby(block).mean().to_numpy(), index=times.to_numpy())
