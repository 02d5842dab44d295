"""Loss curves over each other: equal runs must be seen to be equal, not to hide each other."""

from __future__ import annotations

import itertools

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from configs.study import Figure as FigureRow
from plots.canvas import fold, pages, sheet, watermark
from plots.observations import observe
from plots.style import SOURCE_STYLES, Look
from plots.tables import PlotError, Tables

_PANEL_INCHES = 2.15
_STRIP = 0.88
"""Where on the vertical axis the strip for losses begins that are no number, from 0 to 1."""


def draw(tables: Tables, _figure: FigureRow, *, asked: bool = True) -> list[Figure]:
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
                entries |= _panel(ax, panel[1])
                ax.set_title(titles[panel[0]], loc="left")
                watermark(ax, set(panel[1]["source"]))
        figures.append(figure)
    return figures


def _panel(ax: Axes, iterations: pd.DataFrame) -> dict[str, Line2D]:
    """Draw the runs of a case, the widest line first; returns handles for the legend."""
    entries = {}
    runs = [(run["look"].iloc[0], run) for _, run in iterations.groupby("path", sort=False)]
    runs.sort(key=lambda item: -item[0].style.width)
    lost = []
    for order, (look, run) in enumerate(runs):
        finite = np.isfinite(run["loss"])
        title = look.title(run["source"].iloc[0])
        entries[title] = _line(ax, look, run, order, len(runs))
        if not finite.all():
            lost.append((look, run.loc[~finite, "iteration"]))
    ax.set_xlabel("iteration")
    ax.set_ylabel("loss")
    ax.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
    ax.margins(y=0.15)
    if lost:
        _mark_lost(ax, lost)
    return entries


def _line(ax: Axes, look: Look, run: pd.DataFrame, order: int, count: int) -> Line2D:
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
