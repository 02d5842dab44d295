"""Blocks of panels over each other: a block a case, a panel a quantity, a line an engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from deep_optimizer_states.units import GIB
from plots.canvas import fold, name_ticks, sheet, watermark
from plots.data import observe, span
from plots.lines import from_zero
from plots.style import SOURCE_STYLES, Look
from plots.tables import PlotError, Tables

_MOST_POINTS = 600
"""Most points of a line; more samples than a figure has pixels are averaged."""


def draw_loss(tables: Tables, _figure: object, *, asked: bool = True) -> Figure:
    """Draw loss against iteration, a panel a case, a line a run.

    Runs that coincide stay apart by width: the reference is wide and drawn first. An iteration
    whose loss is NaN or infinite is marked at the top.

    Raises:
        PlotError: no run has a loss.
    """
    del asked
    known = tables.iterations[tables.iterations["loss_known"]].dropna(subset=["iteration"])
    if known.empty:
        raise PlotError("no run has a loss: no curves to draw")
    known = known.merge(observe(tables).runs[["path", "look"]], on="path")
    notes = ["loss of every iteration, warm-up included", tables.provenance(known["path"])]
    return _draw_blocks(_loss_panel, known, [None], notes, (1.9, 0.35), _loss_style)


def _loss_panel(ax: Axes, block: pd.DataFrame, _row: object, last: bool) -> None:
    """Draw the runs of a case, the widest line first."""
    del last
    runs = [(run["look"].iloc[0], run) for _, run in block.groupby("path", sort=False)]
    runs.sort(key=lambda item: -item[0].style.width)
    for order, (look, run) in enumerate(runs):
        # Many lines take turns in their markers, which would hide each other where lines agree.
        step = max(1, len(run) * max(len(runs), 3) // 36)
        from_here = order * step // len(runs) if len(runs) > 3 else 0
        is_finite = np.isfinite(run["loss"])
        ax.plot(
            run["iteration"], run["loss"].where(is_finite), markevery=(from_here, step),
            zorder=3 + order, **_loss_style(look, run["source"].iloc[0]),
        )  # fmt: skip
        lost = run.loc[~is_finite, "iteration"]
        if lost.empty:
            continue
        ax.plot(
            lost, np.full(len(lost), 0.99 - 0.03 * order), linestyle="none", marker="v",
            markersize=4, color=look.style.colour, transform=ax.get_xaxis_transform(), zorder=20,
            gid="no number",
        )  # fmt: skip
    ax.set_xlabel("iteration (at the top: ▼ no number)" if not np.isfinite(block["loss"]).all()
                  else "iteration")  # fmt: skip
    ax.set_ylabel("loss")
    ax.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
    ax.margins(y=0.15)


def _loss_style(look: Look, source: str) -> dict[str, Any]:
    style = look.style
    filled = look.variant == 0 and not SOURCE_STYLES[source].hollow
    return {
        "color": style.colour, "linestyle": style.dash, "linewidth": style.width,
        "marker": style.marker, "markersize": style.marker_size, "markeredgewidth": 1.2,
        "markerfacecolor": style.colour if filled else "none",
    }  # fmt: skip


class _Memory(NamedTuple):
    """One panel of memory."""

    column: str
    label: str
    note: str


_DEVICE = _Memory("allocated_gib", "device memory (GiB)", "device: allocated by rank 0")
_PROCESS = _Memory("allocated_gib", "process memory (GiB)", "process: rank 0's own, no device")
_MACHINE = _Memory("host_used_gib", "machine's\nmemory (GiB)", "machine: all its processes")


def draw_memory(tables: Tables, _figure: object, *, asked: bool = True) -> Figure:
    """Draw device and host memory, a panel each and case, over the titles of an iteration.

    Raises:
        PlotError: ``memory.csv`` is missing or holds no memory of an iteration.
    """
    del asked
    lines = _memory_lines(tables)
    on_cpu = lines["device"].str.startswith("cpu").all()
    rows = [_PROCESS if on_cpu else _DEVICE, _MACHINE]
    rows = [row for row in rows if _is_known(lines, row.column)]
    if not rows:
        raise PlotError("memory.csv holds no memory inside an iteration")
    counts = [
        len(own[["path", "iteration"]].drop_duplicates())
        for _, own in lines.groupby(["case", "look"], sort=False)
    ]
    notes = [f"median of n={span(counts)} iterations", *(row.note for row in rows)]
    notes.append(tables.provenance(set(lines["path"])))
    return _draw_blocks(_memory_panel, lines, rows, notes, (1.75, 0.95), _line_style)


def _memory_lines(tables: Tables) -> pd.DataFrame:
    """Return memory lines of iterations after the warm-up, each with its place in its iteration.

    Raises:
        PlotError: there are none.
    """
    table = tables.memory
    of_runs = ["look", "warmup_iterations", "source", "device"]
    runs = observe(tables).runs[["path", *of_runs]]
    rows = table.drop(columns=of_runs, errors="ignore").merge(runs, on="path")
    rows = rows[rows["iteration"].notna() & (rows["title"] != "")]
    timed = rows[rows["iteration"] > rows["warmup_iterations"]]
    # A run of one iteration has nothing after its warm-up; its memory is no worse for that.
    rows = timed if len(timed) else rows
    if rows.empty:
        raise PlotError("memory.csv holds no titled line inside an iteration")
    return rows.assign(nth=rows.groupby(["path", "iteration", "title"]).cumcount())


def _is_known(lines: pd.DataFrame, column: str) -> bool:
    return column in lines and bool(lines[column].max() > 0)


def _memory_panel(ax: Axes, block: pd.DataFrame, row: _Memory, last: bool) -> None:
    titles = _titles(block)
    for look, lines in sorted(block.groupby("look", sort=False), key=lambda item: item[0]):
        level = lines.groupby(["title", "nth"])[row.column].median().reindex(titles)
        ax.plot(range(len(titles)), level.to_numpy(), **_line_style(look))
    ax.set_ylabel(row.label)
    from_zero(ax)
    name_ticks(ax, range(len(titles)), [title if last else "" for title, _ in titles])


def _titles(lines: pd.DataFrame) -> list[tuple[str, int]]:
    """Return titles in the order of the longest iteration, one that comes again with its count."""
    path, iteration = lines.groupby(["path", "iteration"], sort=False).size().idxmax()
    longest = lines[(lines["path"] == path) & (lines["iteration"] == iteration)]
    both = pd.concat([longest, lines])
    return list(dict.fromkeys(zip(both["title"], both["nth"], strict=True)))


class _Resource(NamedTuple):
    """One panel of a timeline: the first column that some sample knows."""

    columns: Mapping[str, str]
    """Label by column."""
    divisor: float = 1.0
    over_devices: str = "mean"
    """``first`` where a sample says the same for every device."""
    top: float | None = None


_RESOURCES = (
    _Resource({"cpu_percent": "CPU (%)"}, over_devices="first", top=100),
    _Resource({"host_used_bytes": "host\nmemory (GiB)",
               "machine_used_bytes": "machine's\nmemory (GiB)"}, GIB, "first"),
    _Resource({"gpu_util_percent": "GPU (%)"}, top=100),
    _Resource({"gpu_memory_run_bytes": "GPU\nmemory (GiB)",
               "gpu_memory_used_bytes": "whole GPU's\nmemory (GiB)"}, GIB, "sum"),
    _Resource({"pcie_rx_bytes_per_s": "PCIe to\nGPU (GB/s)"}, 1e9, "sum"),
    _Resource({"pcie_tx_bytes_per_s": "PCIe from\nGPU (GB/s)"}, 1e9, "sum"),
)  # fmt: skip
"""From above: the host, then the devices; one that no sample knows is left out."""


def draw_utilisation(tables: Tables, _figure: object, *, asked: bool = True) -> Figure:
    """Draw timelines over the run, a row a resource, engines over each other; a block a case.

    Raises:
        PlotError: ``monitor.csv`` is missing or holds no sample of anything.
    """
    del asked
    runs = observe(tables).runs[["path", "look", "source"]]
    rows = tables.monitor.drop(columns="source", errors="ignore").merge(runs, on="path")
    rows = rows[rows["time_s"].notna()]
    samples = rows[rows["path"].isin(set(rows.drop_duplicates(["case", "look"])["path"]))]
    shown = [
        (column, resource)
        for resource in _RESOURCES
        for column in resource.columns
        if column in samples and samples[column].notna().any()
    ]
    firsts = list({id(resource): (column, resource) for column, resource in shown[::-1]}.values())
    if not firsts:
        raise PlotError("monitor.csv holds no sample of a processor, of memory or of PCIe")
    notes = ["the first run of each engine, start-up included"]
    if "device_id" in samples and samples["device_id"].notna().any():
        notes.append("sums and means over devices")
    notes.append(tables.provenance(set(samples["path"])))
    return _draw_blocks(_resource_panel, samples, firsts[::-1], notes, (1.1, 0.5), _line_style)


def _resource_panel(ax: Axes, block: pd.DataFrame, row: tuple[str, _Resource], last: bool) -> None:
    column, resource = row
    for look, samples in sorted(block.groupby("look", sort=False), key=lambda item: item[0]):
        line = _thinned(samples, column, resource)
        ax.plot(line.index, line.to_numpy(), markevery=max(1, len(line) // 10), **_line_style(look))
        # Where this run ends, which need not be where the longest of the panel does.
        ax.axvline(samples["time_s"].max(), color=look.alone.colour, linewidth=0.8, zorder=1,
                   gid="end")  # fmt: skip
    ax.set_ylabel(resource.columns[column])
    if resource.top is None:
        from_zero(ax)
    else:
        ax.set_ylim(0, resource.top)
    ax.set_xlim(0, float(block["time_s"].max()) or 1.0)
    ax.tick_params(axis="x", labelbottom=last)
    ax.set_xlabel("time since the start of the run (s)" if last else "")


def _thinned(samples: pd.DataFrame, column: str, resource: _Resource) -> pd.Series:
    """Return values by time; means over as many neighbours as leave points that can be seen.

    The last sample stays where it is, so that the line ends where the run does.
    """
    known = samples[samples[column].notna()]
    line = known.groupby("time_s")[column].agg(resource.over_devices) / resource.divisor
    table = line.rename("value").reset_index()
    step = max(1, -(-len(line) // _MOST_POINTS))
    means = table.groupby(table.index // step).mean()
    means.loc[means.index[-1:], "time_s"] = table["time_s"].iloc[-1:].to_numpy()
    return means.set_index("time_s")["value"]


def _line_style(look: Look, _source: str = "") -> dict[str, Any]:
    style = look.alone
    return {
        "color": style.colour, "linestyle": style.dash, "linewidth": style.width,
        "marker": style.marker, "markersize": 4,
    }  # fmt: skip


def _draw_blocks(
    panel: Callable[[Axes, pd.DataFrame, Any, bool], None],
    lines: pd.DataFrame,
    rows: Sequence[Any],
    notes: Sequence[str],
    sizes: tuple[float, float],
    style: Callable[[Look, str], dict[str, Any]],
) -> Figure:
    """Draw a block a case.

    Args:
        panel: Draws one row of a case, told whether it is the last.
        lines: With ``case``, ``look`` and ``source``.
        rows: What each block shows, from above.
        notes: For the footnote.
        sizes: Of a row, and of what is below a block, in inches.
        style: Of a line of an engine and a source, for the legend.
    """
    named = lines[["look", "source"]].drop_duplicates().sort_values("look").to_numpy()
    handles = {look.title(source): Line2D([], [], **style(look, source)) for look, source in named}
    inches = sizes[1] + len(rows) * sizes[0]
    blocks = list(lines.groupby("case", sort=False))
    shape = len(blocks) * len(rows), 1
    with sheet(handles, 0.6 + len(blocks) * inches, shape, notes) as (figure, grid):
        for place, ax in enumerate(grid[:, 0]):
            (case, block), row = blocks[place // len(rows)], rows[place % len(rows)]
            panel(ax, block, row, row is rows[-1])
            watermark(ax, set(block["source"]), size=22 if sizes[0] > 1.5 else 14)
            if row is rows[0] and case:
                ax.set_title(fold(case, 62), loc="left")
    return figure
