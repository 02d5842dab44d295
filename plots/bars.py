"""Bars of engines: their faces, what they stand for, and panels of horizontal ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple, Self

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from configs.naming import Namer
from configs.study import Figure as FigureRow, Phase, Study, Style
from plots.canvas import INSIDE, fold, pages, plain, sheet, watermark
from plots.data import (
    Observations,
    Panel,
    X,
    describe,
    fields_of,
    observe,
    remarks,
    setting_title,
    split,
    summarise,
    taken,
    varying,
)
from plots.style import REST, SOURCE_STYLES, Look, ink, phase_styles
from plots.tables import MEASURED, SOURCES, PlotError, Tables
from plots.units import ITERATION, TOTAL, UPDATE_RATE, Quantity, Scale, quantity, short

Draw = Callable[[Axes, float, "Bar"], float]
"""Draws a bar at a place; returns where on the axis its number goes."""

_BAR_INCHES = 0.33
_CHARACTERS = {1: 72, 2: 45}
"""Room of a panel's title and the names beside it, by the number of columns."""
_SLIVER = 6.0
"""Panels whose longest bars differ so much have a scale each."""


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
    ends = {title: max(length(bar) for bar in bars) for title, bars in panels}
    one_scale = max(ends.values()) <= _SLIVER * min(ends.values())
    note = "" if one_scale else "panels have scales of their own"
    ends = dict.fromkeys(ends, max(ends.values())) if one_scale else ends
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
                _draw_bars(ax, bars, draw, length)
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


def _draw_bars(ax: Axes, bars: Sequence[Bar], draw: Draw, length: Callable[[Bar], float]) -> None:
    """Draw the bars of a panel from above, and write behind each how long it is."""
    for place, bar in enumerate(bars):
        drawn_to = draw(ax, place, bar)
        ax.annotate(
            short(length(bar)), (drawn_to, place), xytext=(4, 0), va="center",
            textcoords="offset points", fontsize=8, fontweight="bold",
        )  # fmt: skip
    ax.set_yticks(range(len(bars)), [plain(bar.name) for bar in bars])
    ax.grid(visible=False, axis="y")


_MOST_IN_ONE_COLUMN = 4


def draw_breakdown(tables: Tables, _figure: FigureRow, *, asked: bool = True) -> list[Figure]:
    """Stacked bars of the phases, a panel a case.

    Raises:
        PlotError: no run has the time of an iteration.
    """
    del asked
    data, study = observe(tables), tables.study
    values = data.values[has_iteration(data.values, study)]
    if values.empty:
        raise PlotError("no run has iterations after its warm-up: no breakdown to draw")
    panels = [(case, bars_of(rows)) for case, rows in values.groupby("case", sort=False)]
    bars = [bar for _, own in panels for bar in own]
    scale = ITERATION.scale(iteration_ms(bar.rows, study) for bar in bars)
    measured = tables.runs[tables.runs["source"] == MEASURED]
    warmups = sorted({int(n) for n in measured["warmup_iterations"].dropna()})
    counted = [v for bar in bars for v in summarise(bar.rows, "iteration_ms")]
    measured_here = any(v.measured for v in counted)
    notes = [
        describe(counted, spread=False),
        f"the first {', '.join(map(str, warmups))} left out" if warmups else "",
        "phases: median of each" if measured_here else "", *remarks(data.runs, data.failed),
        tables.provenance(set(values["path"])),
    ]  # fmt: skip
    return draw_panels(
        panels,
        partial(_stack, study=study, divisor=scale.divisor),
        lambda bar: iteration_ms(bar.rows, study) / scale.divisor,
        ITERATION.label(scale, measured_here).replace("\n", " "),
        (phase_handles(bars, study), notes),
        1 if len(panels) <= _MOST_IN_ONE_COLUMN else 2,
    )


def _stack(ax: Axes, at: float, bar: Bar, study: Study, divisor: float) -> float:
    """Draw the phases of a bar, with numbers in segments that are not narrow."""
    styles, start = phase_styles(study), 0.0
    lengths = {phase: ms / divisor for phase, ms in phases(bar.rows, study).items()}
    for phase, length in lengths.items():
        style = styles[phase]
        ax.barh(at, length, left=start, height=0.68, **phase_face(style, bar.source))
        if phase != REST:
            box = {"boxstyle": "round,pad=0.15", "facecolor": style.colour, "linewidth": 0}
            ax.text(
                start + length / 2, at, short(length), ha="center", va="center", fontsize=7,
                color=ink(style.colour), bbox=box, gid=INSIDE,
            )  # fmt: skip
        start += length
    return start


def draw_rates(tables: Tables, figure: FigureRow, *, asked: bool = True) -> list[Figure]:
    """Draw medians with quartiles, engine by engine, the largest value of the setting first.

    Raises:
        PlotError: no run has the quantity, or, unasked, there is one value of the setting alone.
    """
    data, study = observe(tables, figure), tables.study
    shown = quantity(figure.y[0], study.phases)
    known = data.values[data.values[shown.column].notna()]
    if known.empty:
        raise PlotError(f"no run has {shown.title}, or what it is worked out from")
    if not asked and known[figure.x].nunique() < 2:
        raise PlotError(f"no two values of {figure.x}")
    every = [
        (one.title, _bars_of_panel(one, figure.x, shown.column, study))
        for one in split(data, figure.x, study)
    ]
    panels = [panel for panel in every if panel[1]]
    values = {id(bar): summarise(bar.rows, shown.column)[0] for _, own in panels for bar in own}
    scale = shown.scale(v.high for v in values.values())

    def bar(ax: Axes, at: float, bar: Bar) -> float:
        value = values[id(bar)]
        low, median, high = (v / scale.divisor for v in (value.low, value.median, value.high))
        ax.barh(at, median, 0.7, **face(bar.look.alone, bar.source))
        ax.errorbar(
            median, at, xerr=([median - low], [high - median]), color="black", capsize=2,
            elinewidth=0.9,
        )  # fmt: skip
        return max(median, high)

    notes = [describe(list(values.values())), *remarks(data.runs, data.failed)]
    notes.append(tables.provenance(set(data.values["path"])))
    label = shown.label(scale, any(v.measured for v in values.values())).replace("\n", " ")
    return draw_panels(
        panels, bar, lambda bar: values[id(bar)].median / scale.divisor, label, ({}, notes)
    )


def _bars_of_panel(panel: Panel, x: str, column: str, study: Study) -> list[Bar]:
    """Bars of the observations that have a quantity, named by engine and setting."""
    rows = panel.values[panel.values[column].notna()]
    found = []
    for at, same in rows.groupby(X, dropna=False):
        known = fields_of({x: same[x].iloc[0]}, study) if taken(same, x, study).all() else {}
        words = [Namer(study).setting(x, value) for value in known.values()]
        order = float("inf") if pd.isna(at) else -at
        found += [(order, replace(b, name=", ".join([b.name, *words]))) for b in bars_of(same)]
    return [bar for _, bar in sorted(found, key=lambda item: (item[1].look, item[0]))]


_NUM_ITERATIONS = 100
_MODEL_INCHES = 1.5
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


def draw_models(tables: Tables, _figure: FigureRow, *, asked: bool = True) -> list[Figure]:
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
    panels = [_Quantity.of(q, every, study) for q in (ITERATION, UPDATE_RATE, TOTAL)]
    panels = [panel for panel in panels if panel.heights]
    inches = 0.45 + len(panels) * _MODEL_INCHES
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
class _Quantity:
    """One quantity, in the unit and on the axis that fit all rows of the figure."""

    quantity: Quantity
    scale: Scale
    heights: dict[int, float]
    """Of the bars that have one, by their ``id``."""

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
        narrow = sum(group.slots for group in row) > 12
        bars = [pair for at, group in _placed(row) for pair in zip(at, group.bars, strict=True)]
        for at, bar in (pair for pair in bars if id(pair[1]) in self.heights):
            height = self.heights[id(bar)]
            if self.quantity is ITERATION:
                top = self._stack(ax, at, bar, study)
            else:
                top = self._bar(ax, at, bar, height)
            ax.annotate(
                short(height), (at, top), xytext=(0, 3), textcoords="offset points",
                ha="center", va="bottom", fontsize=6.5, rotation=90 if narrow else 0,
                annotation_clip=False,
            )  # fmt: skip
        ax.set_ylim(0, 1.25 * max(self.heights.values()))

    def _stack(self, ax: Axes, at: float, bar: Bar, study: Study) -> float:
        styles, top = phase_styles(study), 0.0
        lengths = {p: ms / self.scale.divisor for p, ms in phases(bar.rows, study).items()}
        for phase, length in lengths.items():
            own = phase_face(styles[phase], bar.source)
            ax.bar(at, length, _WIDTH, bottom=top, **own)
            top += length
        return top

    def _bar(self, ax: Axes, at: float, bar: Bar, height: float) -> float:
        ax.bar(at, height, _WIDTH, **face(bar.look.alone, bar.source))
        (value,) = summarise(bar.rows, self.quantity.column)
        low, high = value.low / self.scale.divisor, value.high / self.scale.divisor
        if high > low and self.quantity is not TOTAL:
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
