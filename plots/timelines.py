"""Blocks of panels over each other: a block a case, a panel a quantity, a line an engine."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from configs.study import Figure as FigureRow
from plots.canvas import fold, pages, sheet, watermark
from plots.data import observe, span
from plots.lines import from_zero
from plots.style import SOURCE_STYLES, Look
from plots.tables import PlotError, Tables
from plots.units import GIB


def draw_blocks(
    panel: Callable[[Axes, pd.DataFrame, Any, bool], dict[str, Any]],
    lines: pd.DataFrame,
    rows: Sequence[Any],
    notes: Sequence[str],
    entries: Mapping[str, Any],
    sizes: tuple[float, float],
) -> list[Figure]:
    """Draw pages of blocks, a block a case.

    Args:
        panel: Draws one row of a case, told whether it is the last; returns handles for the legend.
        lines: With ``case``, ``look`` and ``source``.
        rows: What each block shows, from above.
        notes: For the footnote.
        entries: Of the legend, after the engines.
        sizes: Of a row, and of what is below a block, in inches.
    """
    names = [*(look.name for look in sorted(lines["look"].unique())), *entries]
    inches = sizes[1] + len(rows) * sizes[0]
    figures = []
    for page in pages(lines.groupby("case", sort=False), lambda _: inches):
        shape = len(page) * len(rows), 1
        with sheet(names, 0.6 + len(page) * inches, shape, notes) as (figure, grid, handles):
            for place, ax in enumerate(grid[:, 0]):
                (case, block), row = page[place // len(rows)], rows[place % len(rows)]
                handles |= panel(ax, block, row, row is rows[-1])
                watermark(ax, set(block["source"]), size=22 if sizes[0] > 1.5 else 14)
                if row is rows[0] and case:
                    ax.set_title(fold(case, 62), loc="left")
            handles |= entries
            figure.align_ylabels(grid)
        figures.append(figure)
    return figures


def by_look(lines: pd.DataFrame) -> Iterator[tuple[Look, pd.DataFrame]]:
    """Yield the lines of each engine, in the order of the figures."""
    yield from sorted(lines.groupby("look", sort=False), key=lambda item: item[0])


class _Curve(NamedTuple):
    """One line an engine in a panel."""

    column: str
    title: str
    """In the legend, beside the engines; empty for the one that they stand for."""
    dash: Any = "solid"
    is_whole: bool = False
    """Of all that runs there: grey, behind."""


_PANELS = {
    "device": (
        _Curve("whole_device_gib", "whole device or machine", is_whole=True),
        _Curve("allocated_gib", ""),
        _Curve("cached_gib", "cached by the allocator", (0, (1, 1.5))),
        _Curve("own_device_gib", "all of the run's processes", (0, (5, 1, 1, 1))),
    ),
    "process": (_Curve("allocated_gib", ""),),
    "host": (
        _Curve("host_used_gib", "whole device or machine", is_whole=True),
        _Curve("own_host_gib", ""),
    ),
    "machine": (_Curve("host_used_gib", ""),),
}
_NOTES = {
    "device": "device: allocated by rank 0",
    "process": "process: rank 0's own, which DeepSpeed counts where there is no device",
    "host": "host: most that the run's processes held in a sample; grey: the whole machine",
    "machine": "machine: all its processes, the run's are not in the samples",
}
_SAMPLED = {
    "own_host_gib": ("host_pss_bytes", "host_used_bytes"),
    "own_device_gib": ("gpu_memory_run_bytes",),
    "whole_device_gib": ("gpu_memory_used_bytes",),
}
"""Largest sample of a run, and the columns of samples that it may be of, the best one first."""
_OF_RUNS = ["look", "warmup_iterations", "source", "device"]


def draw_memory(tables: Tables, _figure: FigureRow, *, asked: bool = True) -> list[Figure]:
    """Device and host memory, a panel each and case, over the titles of an iteration in order.

    What the run's own processes hold is drawn in front of what all hold.

    Raises:
        PlotError: ``memory.csv`` is missing or holds no memory of an iteration.
    """
    del asked
    lines = _lines(tables)
    kinds = _shown(lines)
    entries = {
        curve.title: Line2D([], [], color="0.6" if curve.is_whole else "0.2", linestyle=curve.dash)
        for kind in kinds
        for curve in _PANELS[kind]
        if curve.title and _is_known(lines, curve.column)
    }
    notes = [_counts(lines), *(_NOTES[kind] for kind in kinds)]
    notes.append(tables.provenance(set(lines["path"])))
    return draw_blocks(_memory_panel, lines, kinds, notes, entries, (1.75, 0.95))


def _lines(tables: Tables) -> pd.DataFrame:
    """Memory lines of iterations after the warm-up, each with its place in its iteration.

    Raises:
        PlotError: there are none.
    """
    table = tables.memory
    known = [c for c in ("allocated_gib", "cached_gib", "host_used_gib") if c in table]
    if not known or "iteration" not in table:
        raise PlotError("memory.csv has no column of memory, or none of the iteration")
    runs = observe(tables).runs[["path", *_OF_RUNS]]
    rows = table.drop(columns=_OF_RUNS, errors="ignore").merge(runs, on="path")
    rows = rows[rows["iteration"].notna() & (rows["title"] != "")]
    timed = rows[rows["iteration"] > rows["warmup_iterations"]]
    # A run of one iteration has nothing after its warm-up; its memory is no worse for that.
    rows = timed if len(timed) else rows
    if rows.empty:
        raise PlotError("memory.csv holds no titled line inside an iteration")
    rows = rows.assign(nth=rows.groupby(["path", "iteration", "title"]).cumcount())
    return rows.merge(_peaks(tables), how="left", on="path")


def _peaks(tables: Tables) -> pd.DataFrame:
    """The largest sample of each run, in GiB; no rows where nothing was sampled."""
    try:
        samples = tables.monitor
    except PlotError:
        return pd.DataFrame({"path": pd.Series(dtype=str)})
    columns = [column for own in _SAMPLED.values() for column in own if column in samples]
    most = samples.groupby("path")[columns].max() / GIB
    found = pd.DataFrame(index=most.index)
    for name, own in _SAMPLED.items():
        for column in (column for column in own if column in most):
            found[name] = found[name].fillna(most[column]) if name in found else most[column]
    return found.reset_index()


def _is_known(lines: pd.DataFrame, column: str) -> bool:
    return column in lines and bool(lines[column].max() > 0)


def _shown(lines: pd.DataFrame) -> list[str]:
    """Panels with more than zeros to show.

    ``device``, or on a CPU ``process``; ``host``, or where nothing is known of the run's own
    processes ``machine``.
    """
    absent = ["device" if lines["device"].str.startswith("cpu").all() else "process"]
    absent.append("machine" if _is_known(lines, "own_host_gib") else "host")
    kinds = [
        kind
        for kind, curves in _PANELS.items()
        if kind not in absent and any(_is_known(lines, c.column) for c in curves if not c.is_whole)
    ]
    if not kinds:
        raise PlotError("memory.csv holds no memory inside an iteration")
    return kinds


def _memory_panel(ax: Axes, lines: pd.DataFrame, kind: str, last: bool) -> dict[str, Any]:
    titles = _titles(lines)
    entries: dict[str, Any] = {}
    for look, rows in by_look(lines):
        style = look.alone
        for curve in (curve for curve in _PANELS[kind] if _is_known(rows, curve.column)):
            level = rows.groupby(["title", "nth"])[curve.column].median()
            values = [float(level.get(key, float("nan"))) for key in titles]
            main = not curve.title
            (line,) = ax.plot(
                range(len(titles)), values, color="0.6" if curve.is_whole else style.colour,
                linestyle=curve.dash, linewidth=style.width if main else 1.2,
                marker=style.marker if main else "", markersize=style.marker_size,
                zorder=1.5 if curve.is_whole else 2,
            )  # fmt: skip
            if main:
                entries[look.name] = line
    ax.set_ylabel(f"{kind} memory (GiB)")
    from_zero(ax)
    ax.set_xticks(range(len(titles)), [title if last else "" for title, _ in titles])
    return entries


def _titles(lines: pd.DataFrame) -> list[tuple[str, int]]:
    """Titles in the order of the longest iteration, one that comes again with its count."""
    sizes = lines.groupby(["path", "iteration"], sort=False).size()
    path, iteration = sizes.idxmax()
    rows = lines[(lines["path"] == path) & (lines["iteration"] == iteration)]
    found = list(zip(rows["title"], rows["nth"], strict=True))
    seen = set(found)
    others = zip(lines["title"], lines["nth"], strict=True)
    return found + [key for key in dict.fromkeys(others) if key not in seen]


def _counts(lines: pd.DataFrame) -> str:
    groups = lines.groupby(["case", "look"], sort=False)
    numbers = [len(rows[["path", "iteration"]].drop_duplicates()) for _, rows in groups]
    text = span(numbers)
    after = " after the warm-up" if (lines["iteration"] > lines["warmup_iterations"]).all() else ""
    return f"median of n={text} iterations{after}"


_WHOLE_GREY = "0.6"
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


def draw_utilisation(tables: Tables, _figure: FigureRow, *, asked: bool = True) -> list[Figure]:
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
    entries = {_WHOLE: Line2D([], [], color=_WHOLE_GREY)} if behind else {}
    notes.append(tables.provenance(set(samples["path"])))
    return draw_blocks(_resource_panel, samples, rows, notes, entries, (1.1, 0.5))


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


def _resource_panel(ax: Axes, block: pd.DataFrame, row: _Row, last: bool) -> dict[str, Any]:
    entries: dict[str, Any] = {}
    for look, samples in by_look(block):
        style = look.alone
        if row.whole:
            whole = _line(samples, row.whole, row)
            ax.plot(whole.index, whole.to_numpy(), color=_WHOLE_GREY, linewidth=1.2, zorder=1.5)
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


_PANEL_INCHES = 2.15
_STRIP = 0.88
"""Where on the vertical axis the strip for losses begins that are no number, from 0 to 1."""


def draw_loss(tables: Tables, _figure: FigureRow, *, asked: bool = True) -> list[Figure]:
    """Loss against iteration, a panel a case, a line a run.

    Runs that coincide stay apart by width: the reference is wide and drawn first. An iteration
    whose loss is NaN or infinite is marked in a strip above the values.

    Raises:
        PlotError: no run has a loss.
    """
    del asked
    known = tables.iterations[tables.iterations["loss_known"]].dropna(subset=["iteration"])
    if known.empty:
        raise PlotError("no run has a loss: no curves to draw")
    known = known.merge(observe(tables).runs[["path", "look"]], on="path")
    panels = list(known.groupby("case", sort=False))
    columns = 1 if len(panels) == 1 else 2
    titles = {case: fold(case, 72 // columns) for case, _ in panels}
    named = known[["look", "source"]].drop_duplicates().sort_values("look").to_numpy()
    names = [look.title(source) for look, source in named]
    notes = "loss of every iteration, warm-up included", tables.provenance(known["path"])
    rows = [panels[at : at + columns] for at in range(0, len(panels), columns)]

    def inches(row: list[tuple[str, pd.DataFrame]]) -> float:
        lines = max(titles[case].count("\n") for case, _ in row)
        return _PANEL_INCHES + 0.4 * (columns == 1) + 0.15 * lines

    figures = []
    for page in pages(rows, inches):
        height = 0.4 + sum(map(inches, page))
        with sheet(names, height, (len(page), columns), notes) as (figure, grid, entries):
            for ax, panel in itertools.zip_longest(grid.ravel(), itertools.chain(*page)):
                if panel is None:
                    ax.remove()
                    continue
                entries |= _loss_panel(ax, panel[1])
                ax.set_title(titles[panel[0]], loc="left")
                watermark(ax, set(panel[1]["source"]))
        figures.append(figure)
    return figures


def _loss_panel(ax: Axes, iterations: pd.DataFrame) -> dict[str, Line2D]:
    """Draw the runs of a case, the widest line first; returns handles for the legend."""
    entries = {}
    runs = [(run["look"].iloc[0], run) for _, run in iterations.groupby("path", sort=False)]
    runs.sort(key=lambda item: -item[0].style.width)
    lost = []
    for order, (look, run) in enumerate(runs):
        finite = np.isfinite(run["loss"])
        title = look.title(run["source"].iloc[0])
        entries[title] = _loss_line(ax, look, run, order, len(runs))
        if not finite.all():
            lost.append((look, run.loc[~finite, "iteration"]))
    ax.set_xlabel("iteration")
    ax.set_ylabel("loss")
    ax.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
    ax.margins(y=0.15)
    if lost:
        _mark_lost(ax, lost)
    return entries


def _loss_line(ax: Axes, look: Look, run: pd.DataFrame, order: int, count: int) -> Line2D:
    style, source = look.style, run["source"].iloc[0]
    filled = look.variant == 0 and not SOURCE_STYLES[source].hollow
    # Many lines take turns in their markers, which would hide each other where lines agree.
    step = max(1, len(run) * max(count, 3) // 36)
    (line,) = ax.plot(
        run["iteration"], run["loss"].where(np.isfinite(run["loss"])), color=style.colour,
        linestyle=style.dash, linewidth=style.width, marker=style.marker,
        markersize=style.marker_size, markerfacecolor=style.colour if filled else "none",
        markevery=(order * step // count if count > 3 else 0, step), zorder=3 + order,
        markeredgewidth=1.2,
    )  # fmt: skip
    return line


def _mark_lost(ax: Axes, lost: list[tuple[Look, pd.Series]]) -> None:
    """Mark iterations without a number in a strip of its own, above all values."""
    low, high = ax.get_ylim()
    ax.set_yticks([at for at in ax.get_yticks() if low <= at <= high])
    ax.set_ylim(low, low + (high - low) / _STRIP)
    strip = Rectangle((0, _STRIP), 1, 1 - _STRIP, transform=ax.transAxes, color="0.93", zorder=0.2)
    ax.add_patch(strip)
    ax.text(
        -0.02, (1 + _STRIP) / 2, "no number", transform=ax.transAxes, ha="right", va="center",
        fontsize=6.5, color="0.3",
    )  # fmt: skip
    for place, (look, iterations) in enumerate(lost, 1):
        height = _STRIP + (1 - _STRIP) * place / (len(lost) + 1)
        ax.plot(
            iterations, np.full(len(iterations), height), linestyle="none", marker="v",
            markersize=4, color=look.style.colour, transform=ax.get_xaxis_transform(), zorder=20,
            gid="no number",
        )  # fmt: skip
