"""Memory over the phases of an iteration, from DeepSpeed's ``memory_breakdown``."""

from __future__ import annotations

from typing import Any, NamedTuple

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from configs.study import Figure as FigureRow
from plots.blocks import Blocks, by_look
from plots.lines import from_zero
from plots.observations import observe
from plots.series import span
from plots.tables import PlotError, Tables
from plots.units import GIB


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


def draw(tables: Tables, _figure: FigureRow, *, asked: bool = True) -> list[Figure]:
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
    blocks = Blocks(_panel, row_inches=1.75, below_inches=0.95, entries=entries)
    return blocks.draw(tables, lines, kinds, [_counts(lines), *(_NOTES[kind] for kind in kinds)])


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


def _panel(ax: Axes, lines: pd.DataFrame, kind: str, last: bool) -> dict[str, Any]:
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
