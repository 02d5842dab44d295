"""Bars of engines: iterations by phase, models, and results of whole runs.

All are grids of panels of horizontal bars: a row a case or a quantity, a column a quantity.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from configs.published import published_runs
from configs.sources import MEASURED, PUBLISHED, SOURCES
from configs.study import ResultsFigure, Study, Style
from plots.canvas import fold, plain, sheet, watermark
from plots.data import (
    Value,
    by_setting,
    describe,
    observe,
    pooled,
)
from plots.style import REST, SOURCE_STYLES, phase_styles
from plots.tables import PlotError, Tables
from plots.units import ITERATION, TOTAL, UPDATE_RATE, Quantity, Scale, quantity, short

_BAR_INCHES = 0.3
_NAME_CHARACTERS = 34
_TITLE_CHARACTERS = 66
_LEAST_SHARE = 0.09
"""Least share of a panel as wide as the figure for a segment with its number inside."""
_OTHERS = Style(colour="#999999")


class Bar(NamedTuple):
    """One value of a panel."""

    name: str
    style: Style
    source: str
    rows: pd.DataFrame
    """The observations that it pools."""


@dataclass(frozen=True)
class Panel:
    """Bars of one quantity."""

    bars: Sequence[Bar]
    quantity: Quantity
    title: str = ""

    @cached_property
    def values(self) -> list[Value | None]:
        """Return the value of each bar; None where it has none."""
        return [pooled(bar.rows, self.quantity.column) for bar in self.bars]

    @property
    def ends(self) -> list[float]:
        """Return how far the bars that have a value reach, whiskers included."""
        return [value.high for value in self.values if value]


def draw_breakdown(
    tables: Tables, _figure: object, *, asked: bool = True, with_rates: bool = False
) -> Figure:
    """Draw iterations as stacks of their phases, a panel a case.

    Args:
        tables: What to draw.
        asked: Draw rates though all runs are of one model.
        with_rates: Draw beside them the update throughput and 100 iterations.

    Raises:
        PlotError: no run has the time of an iteration, or, unasked, all are of one model.
    """
    data = observe(tables)
    values = data.values[data.values["iteration_ms"].notna()]
    if values.empty:
        raise PlotError("no run has the time of an iteration after its warm-up")
    if with_rates and not asked and values["model"].nunique() < 2:
        raise PlotError(f"only one model, {values['model'].iloc[0]}")
    quantities = (ITERATION, UPDATE_RATE, TOTAL) if with_rates else (ITERATION,)
    rates = data.values["update_rate"].notna() if with_rates else False
    shown = data.values[data.values["iteration_ms"].notna() | rates]
    rows = [
        [Panel(bars, one, case if one is ITERATION else "") for one in quantities]
        for case, own in shown.groupby("case", sort=False)
        for bars in [_bars(own)]
    ]
    measured = tables.runs[tables.runs["source"] == MEASURED]
    warmups = sorted({int(n) for n in measured["warmup_iterations"].dropna()})
    notes = [f"the first {', '.join(map(str, warmups))} left out"] if warmups else []
    if (shown["source"] == MEASURED).any():
        notes.append("phases: median of each")
    if with_rates:
        notes.append("100 iterations: 100 times one, not run")
    return _draw(tables, rows, [*notes, *data.remarks()])


draw_models = partial(draw_breakdown, with_rates=True)


def draw_results(tables: Tables, figure: ResultsFigure, *, asked: bool = True) -> Figure:
    """Draw a panel for each of the figure's quantities that a run has, published values beside.

    Raises:
        PlotError: no run has any of them.
    """
    del asked
    data, study = observe(tables, figure.y), tables.study
    others = published_runs(study)
    rows = []
    for shown in (quantity(name, study) for name in figure.y):
        bars = [
            Bar(
                ", ".join([one.look.title(one.source), *one.words]),
                one.look.alone,
                one.source,
                one.rows,
            )
            for one in by_setting(data, study)
            if one.rows[shown.column].notna().any()
        ]
        if bars:
            also = others.get(shown.column, {}).items()
            bars += [_published_bar(label, shown.column, value) for label, value in also]
            rows.append([Panel(bars, shown, shown.title)])
    if not rows:
        raise PlotError(f"no run has {' or '.join(figure.y)}")
    notes = data.remarks()
    if any(bar.source == PUBLISHED for [panel] in rows for bar in panel.bars):
        notes.append("hollow: published by others on other hardware and data, not measured here")
    return _draw(tables, rows, notes)


def _published_bar(label: str, column: str, value: float) -> Bar:
    row = {column: value, "path": label, "iterations": 0, "source": PUBLISHED}
    return Bar(f"published: {label}", _OTHERS, PUBLISHED, pd.DataFrame([row]))


def _bars(rows: pd.DataFrame) -> list[Bar]:
    """Return bars by engine; several points of one are named by their labels."""
    found = []
    for (look, source), own in rows.groupby(["look", "source"], sort=False):
        points = [point for _, point in own.groupby("point", sort=False)]
        for point in points:
            name = look.title(source) if len(points) == 1 else point["label"].iloc[0]
            found.append(((look, SOURCES.index(source)), Bar(name, look.alone, source, point)))
    return [bar for _, bar in sorted(found, key=lambda item: item[0])]


def _draw(tables: Tables, rows: Sequence[Sequence[Panel]], notes: Iterable[str]) -> Figure:
    """Draw rows of panels; a column of one quantity has one scale."""
    study, columns = tables.study, list(zip(*rows, strict=True))
    flat = [panel for row in rows for panel in row]
    scales = {
        one: one.scale(end for panel in flat if panel.quantity == one for end in panel.ends)
        for one in {panel.quantity for panel in flat}
    }
    longest = [max(end for panel in column for end in [0.0, *panel.ends]) for column in columns]
    is_shared = len(scales) == len(columns)
    counted = [value for panel in columns[0] for value in panel.values if value]
    paths = {path for panel in flat for bar in panel.bars for path in bar.rows["path"]}
    about = [describe(counted), *notes, tables.provenance(paths, of_times=True)]
    is_measured = any(value.measured for value in counted)

    def inches(row: Sequence[Panel]) -> float:
        lines = fold(row[0].title, _TITLE_CHARACTERS).count("\n") + 2.5 * (not is_shared)
        return 0.3 + 0.16 * lines + _BAR_INCHES * len(row[0].bars)

    layout = {
        "sharex": "col" if is_shared else "none",
        "gridspec_kw": {"height_ratios": [len(row[0].bars) for row in rows]},
    }
    shape, height = (len(rows), len(columns)), 0.85 + sum(map(inches, rows))
    with sheet(_handles(flat, study), height, shape, about, **layout) as (figure, grid):
        for axes, row in zip(grid, rows, strict=True):
            for column, (ax, panel) in enumerate(zip(axes, row, strict=True)):
                scale = scales[panel.quantity]
                end = longest[column] if is_shared else max(panel.ends, default=0.0)
                _draw_panel(ax, panel, scale, study, _LEAST_SHARE * len(row) * end)
                ax.tick_params(axis="y", labelleft=column == 0)
                label = panel.quantity.label(scale, is_measured).replace("\n", " ")
                if not is_shared or row is rows[-1]:
                    ax.set_xlabel(fold(label, _TITLE_CHARACTERS // len(row)))
    return figure


def _draw_panel(ax: Axes, panel: Panel, scale: Scale, study: Study, least_ms: float) -> None:
    """Draw bars from above, their quartiles, behind each how long it is, and in long segments."""
    for place, (bar, value) in enumerate(zip(panel.bars, panel.values, strict=True)):
        if value is None:
            continue
        low, median, high = (v / scale.divisor for v in (value.low, value.median, value.high))
        parts = _phases(bar.rows, study) if panel.quantity is ITERATION else {}
        start = 0.0
        for phase, ms in parts.items():
            style, length = phase_styles(study)[phase], ms / scale.divisor
            face = _face(style.colour, style.hatch, bar.source)
            told = f"{bar.name}\n{style.title} ({scale.unit})"
            ax.barh(place, length, left=start, height=0.7, label=told, **face)
            if phase != REST and ms > least_ms:
                box = {"boxstyle": "round,pad=0.15", "facecolor": "white", "linewidth": 0}
                ax.text(
                    start + length / 2, place, short(length), ha="center", va="center",
                    fontsize=6.5, bbox=box,
                )  # fmt: skip
            start += length
        if not parts:
            face = _face(bar.style.colour, bar.style.hatch, bar.source)
            what = panel.quantity.label(scale, value.measured).replace("\n", " ")
            told = f"{bar.name}\n{what}"
            ax.barh(place, median, 0.7, label=told, **face)
        has_spread = high > low and panel.quantity is not TOTAL
        if has_spread:
            ax.errorbar(
                median, place, xerr=([median - low], [high - median]), color="black", capsize=2,
                elinewidth=0.9,
            )  # fmt: skip
        ax.annotate(
            short(median), (high if has_spread else median, place), xytext=(4, 0), va="center",
            fontsize=7.5, textcoords="offset points", fontweight="bold",
        )  # fmt: skip
    names = [plain(fold(bar.name, _NAME_CHARACTERS)) for bar in panel.bars]
    ax.set_yticks(range(len(names)), names, fontsize=7.5)
    ax.set_ylim(len(names) - 0.5, -0.5)
    ax.margins(x=0.22)
    ax.set_title(fold(panel.title, _TITLE_CHARACTERS), loc="left")
    ax.grid(visible=False, axis="y")
    watermark(ax, {bar.source for bar in panel.bars}, size=16)


def _phases(rows: pd.DataFrame, study: Study) -> dict[str, float]:
    """Return the median ms of each known phase, and of what of the iteration no phase covers."""
    medians = {phase: rows[f"{phase}_ms"].median() for phase in study.phases}
    found = {phase: float(median) for phase, median in medians.items() if median > 0}
    rest = rows["iteration_ms"].median() - sum(found.values())
    return found | ({REST: float(rest)} if found and rest > 1e-9 else {})


def _face(colour: str, hatch: str, source: str) -> dict[str, Any]:
    """Return fill, hatch and edge of a bar; published values are hollow."""
    if SOURCE_STYLES[source].hollow:
        edge = "0.4" if colour.lower() in ("#ffffff", "white") else colour
        return {"facecolor": "white", "hatch": hatch, "edgecolor": edge, "linewidth": 1.3}
    fill = colour, SOURCE_STYLES[source].alpha
    return {"facecolor": fill, "hatch": hatch, "edgecolor": "black", "linewidth": 0.5}


def _handles(panels: Sequence[Panel], study: Study) -> dict[str, Patch]:
    """Return the legend of the phases that some bars have, in the order they run."""
    bars = [bar for panel in panels if panel.quantity is ITERATION for bar in panel.bars]
    found = {phase for bar in bars for phase in _phases(bar.rows, study)} if study.phases else set()
    return {
        style.title: Patch(**_face(style.colour, style.hatch, MEASURED))
        for name, style in phase_styles(study).items()
        if name in found
    }
