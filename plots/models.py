"""The models side by side: iteration breakdown, update throughput, time of 100 iterations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from configs.study import Figure as FigureRow, Study
from plots.bars import (
    CUT_NOTE,
    Bar,
    axis_end,
    bars_of,
    face,
    has_iteration,
    iteration_ms,
    mark_cut,
    phase_face,
    phase_handles,
    phases,
)
from plots.canvas import fold, pages, sheet, watermark
from plots.observations import Observations, observe, varying
from plots.series import describe, remarks, setting_title, summarise
from plots.style import phase_styles
from plots.tables import SOURCES, PlotError, Tables
from plots.units import ITERATION, TOTAL, UPDATE_RATE, Quantity, Scale, short

_NUM_ITERATIONS = 100
_PANEL_INCHES = 1.5
_MOST_BARS = 30
"""In a row, so that a bar stays as wide as its tag."""
_WIDTH, _GAP = 0.9, 0.8
_ROW_CHARACTERS = {8.0: 100, 6.0: 130}
"""Room below a row, by size of the font."""


class _Group(NamedTuple):
    title: str
    bars: list[Bar]

    @property
    def slots(self) -> int:
        """Room in bars: that of three engines at least, for the sake of its name."""
        return max(len(self.bars), 3)


def draw(tables: Tables, _figure: FigureRow, *, asked: bool = True) -> list[Figure]:
    """Three panels over groups of engines, a group a model; many models take several rows.

    Raises:
        PlotError: no run has the time of an iteration and names its model, or, unasked, all are of
            one model.
    """
    data, study = observe(tables), tables.study
    known = sorted({name for name in data.values["model"] if name})
    if not known:
        raise PlotError("no run has the time of an iteration and names its model")
    if not asked and len(known) == 1:
        raise PlotError(f"only one model, {known[0]}")
    groups = _groups(data, study)
    every = [bar for group in groups for bar in group.bars]
    handles = phase_handles(every, study) | _engine_handles(every)
    values = [v for bar in every for v in summarise(bar.rows, "iteration_ms")]
    measured = any(v.measured for v in values)
    notes = [
        describe(values), "phases: median of each" if measured else "",
        f"100 iterations: {_NUM_ITERATIONS} times {'the median' if measured else 'one'}, not run",
        *remarks(data.runs, data.failed), tables.provenance(set(data.values["path"])),
    ]  # fmt: skip
    panels = [_Panel.of(q, every, study) for q in (ITERATION, UPDATE_RATE, TOTAL)]
    panels = [panel for panel in panels if panel.heights]
    if any(max(panel.heights.values()) > panel.end for panel in panels):
        notes.insert(3, CUT_NOTE)
    inches = 0.45 + len(panels) * _PANEL_INCHES
    figures = []
    for page in pages(_in_rows(groups), lambda _: inches):
        shape = len(page) * len(panels), 1
        with sheet(handles, 0.5 + len(page) * inches, shape, notes) as (figure, grid, entries):
            entries |= handles
            for place, ax in enumerate(grid[:, 0]):
                row, panel = page[place // len(panels)], panels[place % len(panels)]
                panel.draw(ax, row, study)
                ax.set_ylabel(panel.quantity.label(panel.scale, measured), fontsize=8)
                _name_bars(ax, row, last=panel is panels[-1])
                watermark(ax, {bar.source for group in row for bar in group.bars})
        figures.append(figure)
    return figures


def _groups(data: Observations, study: Study) -> list[_Group]:
    """Groups of bars: models by their size, the settings of a model as they come."""
    shown = data.runs[data.runs["path"].isin(set(data.values["path"]))]
    names = varying(shown, data.settings)
    if {"accumulation", "global_batch_size"} <= set(names):
        names.remove("global_batch_size")
    sizes = shown.groupby("model", sort=False)["parameters"].max().fillna(math.inf)
    found = [
        (
            sizes[rows["model"].iloc[0]],
            _Group(setting_title(rows.iloc[0], names, study), bars_of(rows)),
        )
        for _, rows in data.values.groupby(list(data.settings), sort=False, dropna=False)
    ]
    return [group for _, group in sorted(found, key=lambda item: item[0])]


def _in_rows(groups: Sequence[_Group]) -> list[list[_Group]]:
    """Deal groups into rows of about as many bars each."""
    total = sum(group.slots for group in groups)
    per_row = total / max(1, -(-total // _MOST_BARS))
    rows: list[list[_Group]] = [[]]
    for group in groups:
        if rows[-1] and sum(g.slots for g in rows[-1]) + group.slots / 2 > per_row:
            rows.append([])
        rows[-1].append(group)
    return rows


def _placed(groups: Sequence[_Group]) -> list[tuple[list[float], _Group]]:
    """Groups of a row with the centres of their bars; a gap of a bar lies between groups."""
    at, found = 0.0, []
    for group in groups:
        first = at + (group.slots - len(group.bars)) / 2
        found.append(([first + i for i in range(len(group.bars))], group))
        at += group.slots + _GAP
    return found


def _engine_handles(bars: Sequence[Bar]) -> dict[str, Patch]:
    """Legend of engines, led by the tags below their bars, in the order of the figures."""
    ordered = sorted(bars, key=lambda bar: (SOURCES.index(bar.source), bar.look))
    return {
        f"{bar.look.tag}: {bar.look.title(bar.source)}": Patch(**face(bar.look.alone, bar.source))
        for bar in ordered
    }


@dataclass(frozen=True)
class _Panel:
    """One quantity, in the unit and on the axis that fit all rows of the figure."""

    quantity: Quantity
    scale: Scale
    heights: dict[int, float]
    """Of the bars that have one, by their ``id``."""

    @property
    def end(self) -> float:
        """Height of what the axis shows whole."""
        return axis_end(list(self.heights.values()))

    @classmethod
    def of(cls, quantity: Quantity, bars: Sequence[Bar], study: Study) -> Self:
        """The quantity of all bars of a figure."""
        stacked = quantity is ITERATION
        heights = {
            id(bar): iteration_ms(bar.rows, study)
            if stacked
            else bar.rows[quantity.column].median()
            for bar in bars
            if not stacked or has_iteration(bar.rows, study).any()
        }
        known = {key: float(height) for key, height in heights.items() if height == height}
        scale = quantity.scale(known.values())
        return cls(quantity, scale, {key: value / scale.divisor for key, value in known.items()})

    def draw(self, ax: Axes, row: Sequence[_Group], study: Study) -> None:
        """Draw a row of groups: medians with quartiles, or for iterations a stack of phases."""
        end = self.end
        narrow = sum(group.slots for group in row) > 12
        bars = [pair for at, group in _placed(row) for pair in zip(at, group.bars, strict=True)]
        for at, bar in (pair for pair in bars if id(pair[1]) in self.heights):
            height = self.heights[id(bar)]
            if self.quantity is ITERATION:
                top = self._stack(ax, at, bar, study)
            else:
                top = self._bar(ax, at, bar, height)
            if height > end:
                top = end
                mark_cut(ax, at, end, upright=True)
            ax.annotate(
                short(height), (at, top), xytext=(0, 3), textcoords="offset points",
                ha="center", va="bottom", fontsize=6.5, rotation=90 if narrow else 0,
                annotation_clip=False,
            )  # fmt: skip
        ax.set_ylim(0, 1.25 * end)

    def _stack(self, ax: Axes, at: float, bar: Bar, study: Study) -> float:
        styles, top = phase_styles(study), 0.0
        lengths = {p: ms / self.scale.divisor for p, ms in phases(bar.rows, study).items()}
        squeeze = min(1.0, self.end / sum(lengths.values()))
        for phase, length in lengths.items():
            own = phase_face(styles[phase], bar.source)
            ax.bar(at, length * squeeze, _WIDTH, bottom=top, **own)
            top += length * squeeze
        return top

    def _bar(self, ax: Axes, at: float, bar: Bar, height: float) -> float:
        ax.bar(at, min(height, self.end), _WIDTH, **face(bar.look.alone, bar.source))
        (value,) = summarise(bar.rows, self.quantity.column)
        low, high = value.low / self.scale.divisor, value.high / self.scale.divisor
        if high > low and self.quantity is not TOTAL and height <= self.end:
            ax.errorbar(
                at, height, yerr=([height - low], [high - height]), color="black", capsize=1.5,
                elinewidth=0.8, capthick=0.8,
            )  # fmt: skip
        return height if self.quantity is TOTAL else max(height, high)


def _name_bars(ax: Axes, groups: Sequence[_Group], last: bool) -> None:
    """Tag every bar, and name the groups below the last axes of a row."""
    placed = _placed(groups)
    tags = [
        (at, bar.look.tag) for row, group in placed for at, bar in zip(row, group.bars, strict=True)
    ]
    ax.set_xticks(*zip(*tags, strict=True), fontsize=6.5)
    ax.tick_params(axis="x", length=0, pad=2)
    width = sum(group.slots + _GAP for group in groups)
    ax.set_xlim(-0.5 - _GAP / 2, width - 0.5 - _GAP / 2)
    ax.grid(visible=False, axis="x")
    for row, group in placed if last else ():
        size = 6.0 if "," in group.title else 8.0
        room = int(_ROW_CHARACTERS[size] * (group.slots + _GAP) / width)
        ax.annotate(
            fold(group.title, max(6, room)), ((row[0] + row[-1]) / 2, 0), ha="center", va="top",
            xycoords=ax.get_xaxis_transform(), xytext=(0, -15), textcoords="offset points",
            fontsize=size,
        )  # fmt: skip
