"""Lines with error bars over a setting that a sweep varies."""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullLocator
from pandas.api.types import is_numeric_dtype

from configs.fields import field_row
from configs.study import SweptFigure
from plots.canvas import fold, name_ticks, sheet, watermark
from plots.data import (
    Panel,
    Series,
    Value,
    X,
    describe,
    observe,
    series,
    split,
    taken,
)
from plots.style import SOURCE_STYLES, Look
from plots.tables import PlotError, Tables
from plots.units import Quantity, Scale, quantity

FAILED = "ended without a time"
_LINEAR_UP_TO = 20.0
"""Ratio of the largest value to the smallest."""
_LEVEL_MARKS = (0.03, 0.97)
"""Places on the axis, from 0 to 1, of the markers of a level that was published."""
_ROW_INCHES = 2.0
_TITLE_CHARACTERS = 66


def draw_swept(tables: Tables, figure: SweptFigure, *, asked: bool = True) -> Figure:
    """Draw quantities against a setting, a row of panels a case.

    Args:
        tables: What to draw.
        figure: Its ``x`` and ``y``.
        asked: Draw it though the setting has one value alone.

    Raises:
        PlotError: no run has both the setting and one of the quantities, or, unasked, no model has
            two values of the setting.
    """
    data, study = observe(tables, figure.y, figure.x), tables.study
    is_along = taken(data.runs, figure.x, study)
    every = split(data, figure.x, study)
    ticks = {id(panel): _values_of_x(panel, is_along) for panel in every}
    several = any(len(values) > 1 for values in ticks.values())
    panels = [panel for panel in every if not several or len(ticks[id(panel)]) > 1]
    wanted = [quantity(column, study) for column in figure.y]
    known = pd.concat([data.values[:0], *(one.values for one in every if ticks[id(one)])])
    columns = [
        Column(one, [series(panel, one.column) for panel in panels])
        for one in wanted
        if known[one.column].notna().any()
    ]
    if not columns:
        titles = " or ".join(one.title for one in wanted)
        raise PlotError(f"no run has {titles} at a known {figure.x}")
    row = field_row(study.all_fields, figure.x)
    if not asked and not several:
        on_axis = is_along & data.runs[X].notna()
        found = sorted(data.runs.loc[on_axis, figure.x].unique().tolist())
        values = ", ".join(map(row.text, found))
        raise PlotError(f"no model was run with two values of {figure.x}, only {values}")
    of_x = data.runs.get(figure.x, pd.Series(dtype=float))
    texts = {} if is_numeric_dtype(of_x) else dict(zip(data.runs[X], of_x, strict=True))
    lines = set(data.runs["look"][is_along])
    flat = [value for column in columns for value in column.values]
    shown = {path for panel in panels for path in panel.runs["path"]}
    drawn = data.values["path"][data.values["path"].isin(shown) & data.values[X].notna()]
    notes = [describe(flat), *data.remarks(shown), tables.provenance(drawn, of_times=True)]
    handles = _handles([one for column in columns for one in column.series], lines)
    shape, height = (len(panels), len(columns)), 0.6 + _ROW_INCHES * len(panels)
    with sheet(handles, height, shape, notes) as (made, grid):
        for place, (axes, panel) in enumerate(zip(grid, panels, strict=True)):
            axes[0].set_title(fold(panel.title, _TITLE_CHARACTERS), loc="left")
            for ax, column in zip(axes, columns, strict=True):
                column.draw(ax, place, lines)
                if at := ticks[id(panel)]:
                    if row.log_axis and at[0] > 0:
                        ax.set_xscale("log", base=2)
                    name_ticks(ax, at, [texts.get(x) or row.text(x) for x in at], len(columns))
                    ax.xaxis.set_minor_locator(NullLocator())
        for ax in grid[-1]:
            ax.set_xlabel(figure.label or row.axis_label)
    return made


@dataclass(frozen=True)
class Column:
    """One quantity in all panels, in one unit."""

    quantity: Quantity
    rows: Sequence[Sequence[Series]]
    """One list for each panel."""

    @property
    def series(self) -> list[Series]:
        """Return those of all panels."""
        return [one for many in self.rows for one in many]

    @cached_property
    def values(self) -> list[Value]:
        """Return those of all panels."""
        return [value for one in self.series for value in one.values]

    def draw(self, ax: Axes, place: int, lines: Set[Look]) -> None:
        """Draw one panel: lines over x, and levels of engines that have no x."""
        scale = self.quantity.scale(value.high for value in self.values)
        many = self.rows[place]
        _draw_levels(ax, [one for one in many if one.look not in lines], scale)
        _draw_lines(ax, [one for one in many if one.look in lines], scale)
        # The label of a line is what stands before its numbers in the table beside the figure.
        unit = self.quantity.label(scale, measured=False).replace("\n", " ")
        for line in ax.get_lines():
            if not str(line.get_label()).startswith("_"):
                line.set_label(f"{line.get_label()}, {unit}")
        watermark(ax, {one.source for one in many})
        _scale_up(ax, [value.median for value in self.values])
        ax.set_ylabel(self.quantity.label(scale, any(value.measured for value in self.values)))


def _values_of_x(panel: Panel, is_along: pd.Series) -> list[float]:
    """Return the values of x that a panel's runs were to have, those that failed included."""
    runs = panel.runs[is_along[panel.runs.index]]
    return sorted(map(float, runs[X].dropna().unique()))


def line_style(look: Look, source: str) -> dict[str, Any]:
    """Return how a line is drawn; others' points are not ours to join and have hollow markers."""
    style, hollow = look.alone, SOURCE_STYLES[source].hollow
    return {
        "color": style.colour, "linestyle": "none" if hollow else style.dash,
        "linewidth": style.width, "marker": style.marker, "markersize": style.marker_size,
        "markerfacecolor": "white" if hollow else style.colour,
        "alpha": SOURCE_STYLES[source].alpha,
    }  # fmt: skip


def _level_style(look: Look) -> dict[str, Any]:
    dash = "solid" if look.is_reference else (0, (5, 2))
    return {"color": look.alone.colour, "linewidth": look.alone.width, "linestyle": dash}


def _handles(many: Sequence[Series], lines: Set[Look]) -> dict[str, Line2D]:
    """Return the legend, measured engines first."""
    found = {}
    for one in many:
        is_line = one.look in lines or SOURCE_STYLES[one.source].hollow
        style = line_style(one.look, one.source) if is_line else _level_style(one.look)
        if one.values:
            found[one.title] = Line2D([], [], **style)
    if any(one.failed for one in many):
        found[FAILED] = Line2D(
            [], [], linestyle="none", marker="X", color="white", markeredgecolor="black"
        )
    return found


def _draw_lines(ax: Axes, found: Sequence[Series], scale: Scale) -> None:
    """Draw a line a series with its quartiles, and a mark where a run ended without a time."""
    for order, one in enumerate(found):
        if one.values:
            middle = [v.median / scale.divisor for v in one.values]
            below = [(v.median - v.low) / scale.divisor for v in one.values]
            above = [(v.high - v.median) / scale.divisor for v in one.values]
            spread = (below, above) if any((*below, *above)) else None
            ax.errorbar(
                [v.x for v in one.values], middle, yerr=spread, capsize=2.5, elinewidth=1.0,
                zorder=3 + order, **line_style(one.look, one.source),
            )[0].set_label(one.title)  # fmt: skip
        if one.failed:
            ax.plot(
                one.failed, [0.03 + 0.05 * order] * len(one.failed), linestyle="none", marker="X",
                color=one.look.alone.colour, markeredgecolor="black", markeredgewidth=0.5,
                markersize=6, transform=ax.get_xaxis_transform(), clip_on=False, zorder=9,
                gid="failed",
            )  # fmt: skip


def _draw_levels(ax: Axes, found: Sequence[Series], scale: Scale) -> None:
    """Draw a horizontal line and the band of its quartiles for engines that have no x."""
    for one in found:
        for value in one.values:
            median = value.median / scale.divisor
            if SOURCE_STYLES[one.source].hollow:
                ax.plot(
                    _LEVEL_MARKS, [median] * len(_LEVEL_MARKS), zorder=8,
                    transform=ax.get_yaxis_transform(), **line_style(one.look, one.source),
                )  # fmt: skip
                continue
            low, high = value.low / scale.divisor, value.high / scale.divisor
            ax.axhspan(low, high, color=one.look.alone.colour, alpha=0.18, linewidth=0, zorder=1)
            ax.axhline(median, zorder=2, **_level_style(one.look))


def _scale_up(ax: Axes, medians: Sequence[float]) -> None:
    """Set a vertical axis from zero, or a logarithmic one where the largest would hide others."""
    if medians and min(medians) > 0 and max(medians) / min(medians) > _LINEAR_UP_TO:
        ax.set_yscale("log")
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ax.yaxis.set_major_formatter("{x:g}")
        ax.yaxis.set_minor_locator(NullLocator())
        ax.margins(y=0.1)
    else:
        from_zero(ax)


def from_zero(ax: Axes) -> None:
    """Set a vertical axis from zero to above the largest value."""
    top = ax.dataLim.y1
    ax.set_ylim(0, 1.1 * top if math.isfinite(top) and top > 0 else 1)
