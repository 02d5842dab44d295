"""Bars of engines: their faces, what they stand for, and panels of horizontal ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.transforms import ScaledTranslation

from configs.study import Phase, Study, Style
from plots.canvas import fold, pages, plain, sheet, watermark
from plots.style import REST, SOURCE_STYLES, Look, phase_styles
from plots.tables import MEASURED, SOURCES
from plots.units import short

Draw = Callable[[Axes, float, "Bar", float], float]
"""Draws a bar at a place, told where the axis ends; returns where on the axis its number goes."""

_BAR_INCHES = 0.33
_CHARACTERS = {1: 72, 2: 45}
"""Room of a panel's title and the names beside it, by the number of columns."""
CUT_NOTE = "bars with a gap are cut: their numbers hold, their lengths do not"
_SLIVER = 6.0
"""A bar so many times as long as the next is cut, and panels that differ so much have a scale each:
beside it the others could not be read."""


@dataclass(frozen=True)
class Bar:
    """All repeats of a point."""

    name: str
    look: Look
    source: str
    rows: pd.DataFrame
    """Its observations."""


def bars_of(rows: pd.DataFrame) -> list[Bar]:
    """Bars of what is compared in one panel, by engine; several points of one by their labels."""
    found = []
    for (look, source), own in rows.groupby(["look", "source"], sort=False):
        points = [point for _, point in own.groupby("point", sort=False)]
        names = [look.title(source)]
        if len(points) > 1:
            names = [point["label"].iloc[0] for point in points]
        found += [Bar(name, look, source, p) for name, p in zip(names, points, strict=True)]
    return sorted(found, key=lambda bar: (bar.look, SOURCES.index(bar.source)))


def has_iteration(rows: pd.DataFrame, study: Study) -> pd.Series:
    """Which observations have the time of an iteration, or of all that it is made of."""
    parts = rows[[f"{phase}_ms" for phase in study.phases]]
    return rows["iteration_ms"].notna() | (parts.notna().all(axis=1) & bool(study.phases))


def phases(rows: pd.DataFrame, study: Study) -> dict[str, float]:
    """Median ms of each known phase, and of what of the iteration no phase covers."""
    medians = {phase: rows[f"{phase}_ms"].median() for phase in study.phases}
    found = {phase: float(median) for phase, median in medians.items() if median > 0}
    rest = rows["iteration_ms"].median() - sum(found.values())
    return found | ({REST: float(rest)} if rest > 0 else {})


def iteration_ms(rows: pd.DataFrame, study: Study) -> float:
    """Median ms of an iteration; of one that is known by its phases alone, what they add up to."""
    median = float(rows["iteration_ms"].median())
    return median if median == median else sum(phases(rows, study).values())


def face(style: Style, source: str) -> dict[str, Any]:
    """Fill, hatch and edge of an engine's bar; published values are hollow."""
    return _face(style.colour, style.hatch, source, style.colour)


def phase_face(style: Phase, source: str) -> dict[str, Any]:
    """Fill, hatch and edge of a phase's segment; published values are hollow."""
    white = style.colour.lower() in ("#ffffff", "white")
    return _face(style.colour, style.hatch, source, "0.4" if white else style.colour)


def _face(colour: str, hatch: str, source: str, outline: str) -> dict[str, Any]:
    if SOURCE_STYLES[source].hollow:
        return {"facecolor": "white", "hatch": hatch, "edgecolor": outline, "linewidth": 1.3}
    fill = colour, SOURCE_STYLES[source].alpha
    return {"facecolor": fill, "hatch": hatch, "edgecolor": "black", "linewidth": 0.5}


def phase_handles(bars: Sequence[Bar], study: Study) -> dict[str, Any]:
    """Legend of the phases that some bars have, in the order they run."""
    found = {phase for bar in bars for phase in phases(bar.rows, study)}
    styles = phase_styles(study).items()
    return {
        style.title: Patch(**phase_face(style, MEASURED)) for name, style in styles if name in found
    }


def axis_end(lengths: Sequence[float]) -> float:
    """Where an axis ends that shows some bars; a few that are far longer than the rest are cut."""
    ordered = sorted(lengths)
    for shorter, longer in pairwise(ordered[(len(ordered) - 1) // 2 :]):
        if longer > _SLIVER * shorter > 0:
            return 1.25 * shorter
    return ordered[-1]


def mark_cut(ax: Axes, at: float, end: float, *, upright: bool = False) -> None:
    """Draw the break in a bar that goes on beyond the end of its axis."""
    place = (at, 0.9 * end) if upright else (0.9 * end, at)
    slash = ((-1, -0.4), (1, 0.4)) if upright else ((-0.4, -1), (0.4, 1))
    for shift, colour in ((0, "white"), (-2, "black"), (2, "black")):
        aside = (0.0, shift / 72) if upright else (shift / 72, 0.0)
        offset = ScaledTranslation(*aside, ax.figure.dpi_scale_trans)
        ax.plot(
            [place[0]], [place[1]], marker=slash, markersize=13, markeredgecolor=colour,
            markeredgewidth=0.8 if shift else 3.4, transform=ax.transData + offset, gid="cut",
            scalex=False, scaley=False,
        )  # fmt: skip


def draw_panels(
    panels: Sequence[tuple[str, Sequence[Bar]]],
    draw: Draw,
    length: Callable[[Bar], float],
    label: str,
    about: tuple[Mapping[str, Any], Sequence[str]],
    columns: int = 1,
) -> list[Figure]:
    """Draw pages of panels of horizontal bars, the first bar of each on top.

    Panels share a scale unless that would make slivers of some.

    Args:
        panels: Titles and bars.
        draw: Draws a bar.
        length: How long a bar is, in the unit of the axis.
        label: Of the axis.
        about: Legend and footnotes.
        columns: Panels beside each other.
    """
    longest = max(len(bar.name) for _, bars in panels for bar in bars)
    width = max(16, _CHARACTERS[columns] - longest)
    titles = {title: fold(title, width) for title, _ in panels}
    ends = {title: axis_end([length(bar) for bar in bars]) for title, bars in panels}
    one_scale = max(ends.values()) <= _SLIVER * min(ends.values())
    note = "" if one_scale else "panels have scales of their own"
    ends = dict.fromkeys(ends, max(ends.values())) if one_scale else ends
    if any(length(bar) > ends[title] for title, bars in panels for bar in bars):
        note = " · ".join(filter(None, [note, CUT_NOTE]))
    rows = [panels[at : at + columns] for at in range(0, len(panels), columns)]

    def inches(row: Sequence[tuple[str, Sequence[Bar]]]) -> float:
        lines = max(1 + titles[title].count("\n") for title, _ in row)
        return 0.2 * (2 - one_scale) + 0.16 * lines + _BAR_INCHES * _slots(row)

    figures = []
    for page in pages(rows, inches):
        shape = len(page), columns
        heights = {"gridspec_kw": {"height_ratios": [_slots(row) for row in page]}}
        height = 0.85 + sum(map(inches, page))
        with sheet(about[0], height, shape, [*about[1], note], **heights) as made:
            figure, grid, entries = made
            entries |= about[0]
            shown = [panel for row in page for panel in row]
            for place, (ax, panel) in enumerate(zip_longest(grid.ravel(), shown)):
                if panel is None:
                    ax.remove()
                    continue
                title, bars = panel
                _panel(ax, bars, draw, length, ends[title])
                ax.set_xlim(0, ends[title] * (1.06 + 0.06 * columns))
                ax.set_ylim(_slots(page[place // columns]) - 0.5, -0.5)  # bars equally thick
                ax.set_title(titles[title], loc="left", fontsize=10.5 - 1.5 * columns)
                ax.tick_params(axis="y", labelsize=9 - columns)
                watermark(ax, {bar.source for bar in bars}, size=30 - 8 * columns)
                last = place + columns >= len(shown)
                ax.tick_params(axis="x", labelbottom=last or not one_scale)
                ax.set_xlabel(label if last else "")
        figures.append(figure)
    return figures


def _slots(row: Sequence[tuple[str, Sequence[Bar]]]) -> int:
    return max(len(bars) for _, bars in row)


def _panel(
    ax: Axes, bars: Sequence[Bar], draw: Draw, length: Callable[[Bar], float], end: float
) -> None:
    """Draw the bars of a panel from above, and write behind each how long it is."""
    for place, bar in enumerate(bars):
        drawn_to = draw(ax, place, bar, end)
        if length(bar) > end:
            drawn_to = end
            mark_cut(ax, place, end)
        ax.annotate(
            short(length(bar)), (drawn_to, place), xytext=(4, 0), va="center",
            textcoords="offset points", fontsize=8, fontweight="bold",
        )  # fmt: skip
    ax.set_yticks(range(len(bars)), [plain(bar.name) for bar in bars])
    ax.grid(visible=False, axis="y")
