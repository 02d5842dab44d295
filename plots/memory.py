"""Memory over the phases of an iteration, from DeepSpeed's ``memory_breakdown``."""

from __future__ import annotations

from typing import Any

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

_COLUMNS = {
    "device": {"allocated_gib": "allocated", "cached_gib": "cached by the allocator"},
    "process": {"allocated_gib": "allocated"},
    "host": {"host_used_gib": "used on the machine"},
}
_NOTES = {
    "device": "device: of rank 0",
    "process": "process: rank 0's own, which DeepSpeed counts where there is no device",
    "host": "host: all processes of the machine",
}
_OF_RUNS = ["look", "warmup_iterations", "source", "device"]
_DASHES: dict[str, Any] = {
    "allocated_gib": "solid",
    "cached_gib": (0, (1, 1.5)),
    "host_used_gib": "solid",
}


def draw(tables: Tables, _figure: FigureRow, *, asked: bool = True) -> list[Figure]:
    """Device and host memory, a panel each and case, over the titles of an iteration in order.

    Raises:
        PlotError: ``memory.csv`` is missing or holds no memory of an iteration.
    """
    del asked
    lines = _lines(tables)
    kinds = _shown(lines)
    entries = {}
    if "device" in kinds:
        for column, text in _COLUMNS["device"].items():
            entries[text] = Line2D([], [], color="0.2", linestyle=_DASHES[column])
    blocks = Blocks(_panel, row_inches=1.75, below_inches=0.95, entries=entries)
    return blocks.draw(tables, lines, kinds, [_counts(lines), *(_NOTES[kind] for kind in kinds)])


def _lines(tables: Tables) -> pd.DataFrame:
    """Memory lines of iterations after the warm-up, each with its place in its iteration.

    Raises:
        PlotError: there are none.
    """
    table = tables.memory
    known = [c for columns in _COLUMNS.values() for c in columns if c in table]
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
    return rows.assign(nth=rows.groupby(["path", "iteration", "title"]).cumcount())


def _shown(lines: pd.DataFrame) -> list[str]:
    """``device`` or on a CPU ``process``, and ``host``: where there is more than zeros to show."""
    on_cpu = lines["device"].str.startswith("cpu").all()
    kinds = [
        kind
        for kind, columns in _COLUMNS.items()
        if kind != ("device" if on_cpu else "process")
        and any(c in lines and lines[c].max() > 0 for c in columns)
    ]
    if not kinds:
        raise PlotError("memory.csv holds no memory inside an iteration")
    return kinds


def _panel(ax: Axes, lines: pd.DataFrame, kind: str, last: bool) -> dict[str, Any]:
    titles = _titles(lines)
    entries: dict[str, Any] = {}
    for look, rows in by_look(lines):
        style = look.alone
        for column in _COLUMNS[kind]:
            if column not in rows:
                continue
            level = rows.groupby(["title", "nth"])[column].median()
            values = [float(level.get(key, float("nan"))) for key in titles]
            main = column != "cached_gib"
            (line,) = ax.plot(
                range(len(titles)), values, color=style.colour, linestyle=_DASHES[column],
                marker=style.marker if main else "", markersize=style.marker_size,
                linewidth=style.width if main else 1.2,
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
