"""Lines with error bars over a setting that a sweep varies."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullLocator

from configs.fields import field_row
from configs.study import Figure as FigureRow
from plots.canvas import fold, pages, sheet, watermark
from plots.data import (
    Panel,
    Series,
    Value,
    X,
    describe,
    in_order,
    observe,
    remarks,
    series,
    split,
    taken,
)
from plots.style import SOURCE_STYLES
from plots.tables import SIMULATED, PlotError, Tables
from plots.units import ONE, Scale, quantity

FAILED = "ended without a time"
_LINEAR_UP_TO = 20.0
"""Ratio of the largest value to the smallest."""
_LEVEL_MARKS = (0.03, 0.97)
"""Where on the axis a level that was published has its markers, from 0 to 1."""


@dataclass(frozen=True)
class Axis:
    """The setting that a figure's x shows."""

    label: str
    is_log: bool = False
    """Values double or grow tenfold."""
    text: Callable[[float], str] = "{:g}".format


def draw_lines(ax: Axes, found: Sequence[Series], scale: Scale) -> dict[str, Any]:
    """Draw a line a series with its quartiles; returns a handle for each entry of the legend."""
    entries: dict[str, Any] = {}
    for order, one in enumerate(found):
        style = one.look.alone
        values = one.values
        if values:
            middle = [v.median / scale.divisor for v in values]
            below = [(v.median - v.low) / scale.divisor for v in values]
            above = [(v.high - v.median) / scale.divisor for v in values]
            # Others' points are not ours to join, nor have they a spread.
            hollow = SOURCE_STYLES[one.source].hollow
            spread = (below, above) if any((*below, *above)) else None
            entries[one.title] = ax.errorbar(
                [v.x for v in values], middle, yerr=spread, color=style.colour,
                linestyle="none" if hollow else style.dash, linewidth=style.width,
                marker=style.marker, markersize=style.marker_size, capsize=2.5, elinewidth=1.0,
                zorder=3 + order,
                alpha=SOURCE_STYLES[one.source].alpha,
                markerfacecolor="white" if hollow else style.colour,
            )  # fmt: skip
        if one.failed:
            height = 0.03 + 0.05 * order
            ax.plot(
                one.failed, [height] * len(one.failed), linestyle="none", marker="X",
                color=style.colour, markeredgecolor="black", markeredgewidth=0.5, markersize=6,
                transform=ax.get_xaxis_transform(), clip_on=False, zorder=9, gid="failed",
            )  # fmt: skip
            entries[FAILED] = Line2D(
                [], [], linestyle="none", marker="X", color="white", markeredgecolor="black"
            )
    return entries


def draw_levels(ax: Axes, found: Sequence[Series], scale: Scale) -> dict[str, Any]:
    """Draw a horizontal line and the band of its quartiles for engines that have no x."""
    entries: dict[str, Any] = {}
    for one in found:
        style = one.look.alone
        for value in one.values:
            if SOURCE_STYLES[one.source].hollow:
                (entries[one.title],) = ax.plot(
                    _LEVEL_MARKS, [value.median / scale.divisor] * len(_LEVEL_MARKS),
                    linestyle="none", marker=style.marker, markersize=style.marker_size,
                    color=style.colour, markerfacecolor="white", zorder=8,
                    transform=ax.get_yaxis_transform(),
                )  # fmt: skip
                continue
            low, high = value.low / scale.divisor, value.high / scale.divisor
            ax.axhspan(low, high, color=style.colour, alpha=0.18, linewidth=0, zorder=1)
            entries[one.title] = ax.axhline(
                value.median / scale.divisor, color=style.colour, linewidth=style.width, zorder=2,
                linestyle="solid" if one.look.is_reference else (0, (5, 2)),
            )  # fmt: skip
    return entries


def finish(ax: Axes, axis: Axis, at: Sequence[float], found: Sequence[Series]) -> None:
    """A tick at each value that was run, and a vertical axis from zero.

    The vertical axis is logarithmic where the largest value would press the others onto it.
    """
    if axis.is_log and at and at[0] > 0:
        ax.set_xscale("log", base=2)
    if at:
        ends = ax.transScale.transform([(value, 1.0) for value in (at[0], at[-1])])[:, 0]
        margin = 0.08 * (ends[1] - ends[0]) or 0.5
        padded = [(ends[0] - margin, 0.0), (ends[1] + margin, 0.0)]
        ax.set_xlim(*ax.transScale.inverted().transform(padded)[:, 0])
        ax.set_xticks(at, [axis.text(value) for value in at])
        ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xlabel(axis.label)
    medians = [v.median for one in found for v in one.values]
    if medians and min(medians) > 0 and max(medians) / min(medians) > _LINEAR_UP_TO:
        ax.set_yscale("log")
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ax.yaxis.set_major_formatter("{x:g}")
        ax.yaxis.set_minor_locator(NullLocator())
        ax.margins(y=0.1)
    else:
        from_zero(ax)


def from_zero(ax: Axes) -> None:
    """A vertical axis from zero to above the largest value."""
    top = ax.dataLim.y1
    ax.set_ylim(0, 1.1 * top if math.isfinite(top) and top > 0 else 1)


@dataclass(frozen=True)
class Ratios:
    """Comparisons of one phase, or of whole iterations."""

    rows: pd.DataFrame
    phase: str
    reference: str

    @classmethod
    def of(cls, tables: Tables, column: str) -> Self | None:
        """The comparisons of a time, by its column; None where there is no table of them."""
        phase = column.removesuffix("_ms")
        try:
            table = tables.comparisons
        except PlotError:
            return None
        # The point has the name in runs.csv that its comparison has as a label.
        rows = table[table["phase"] == phase].assign(point=table["label"])
        return cls(rows, phase, tables.study.reference)

    @property
    def how(self) -> str:
        """What the ratios are, for the footnote."""
        if (self.rows["source"] == SIMULATED).all():
            return f"ratio: {self.reference}'s predicted {self.phase} over the engine's"
        return "speed-up: ratio of medians with its interval in comparisons.csv"

    def draw(self, ax: Axes, many: Sequence[Series], panel: Panel) -> None:
        """Draw the ratios of a panel that are claimed; say of the others why not."""
        known = panel.runs[["point", "source", X, "look"]].drop_duplicates()
        own = self.rows.drop(columns=X, errors="ignore")
        rows = own.merge(known, on=["point", "source"]).sort_values(X)
        predicted = rows["source"] == SIMULATED
        claimed = rows[((rows["speedup"] != "") | predicted) & rows["ratio"].notna()]
        for one in many:
            mine = claimed[(claimed["look"] == one.look) & (claimed["source"] == one.source)]
            values = tuple(_value(row) for _, row in mine.iterrows())
            draw_lines(ax, [Series(one.look, one.source, values)], ONE)
        ax.axhline(1.0, color="0.4", linewidth=0.8, zorder=1)
        what = "predicted ratio to" if predicted.any() else "speed-up over"
        ax.set_ylabel(f"{what} {self.reference}")
        ax.set_ylim(0, 1.15 * max([1.0, *claimed["ratio"], *claimed["ratio_high"].dropna()]))
        ax.text(
            0.97, 0.05, _withheld(rows, rows.drop(claimed.index)), transform=ax.transAxes,
            ha="right", va="bottom", fontsize=7, color="0.25", zorder=12, gid="withheld",
        )  # fmt: skip


def _value(row: pd.Series) -> Value:
    ratio = float(row["ratio"])
    low, high = (float(row[name]) for name in ("ratio_low", "ratio_high"))
    low, high = (ratio if pd.isna(end) else end for end in (low, high))
    return Value(float(row[X]), ratio, min(low, ratio), max(high, ratio), 0, 0)


def _withheld(rows: pd.DataFrame, rest: pd.DataFrame) -> str:
    """``3 of 8 ratios withheld: ...``; empty when all are drawn."""
    if rest.empty:
        return "" if len(rows) else "nothing compared"
    reasons = sorted({reason for reason in rest["withheld"] if reason})
    text = f"{len(rest)} of {len(rows)} ratios withheld"
    return "\n".join([text, *(fold(reason, 44) for reason in reasons[:3])])


_ROW_INCHES = 2.0
_TITLE_CHARACTERS = 66


def draw_swept(
    tables: Tables, figure: FigureRow, *, asked: bool = True, with_ratios: bool = False
) -> list[Figure]:
    """Draw quantities against a setting.

    Args:
        tables: What to draw.
        figure: Its ``x`` and ``y``.
        asked: Draw it though the setting has one value alone.
        with_ratios: Draw beside them what ``comparisons.csv`` says of the first.

    Raises:
        PlotError: no run has both the setting and one of the quantities, or, unasked, no model has
            two values of the setting.
    """
    swept = _Swept(tables, figure)
    swept.check(asked)
    if not with_ratios:
        return swept.draw()
    return swept.draw(Ratios.of(tables, figure.y[0]), "no comparisons")


class _Swept:
    """The observations of one figure, in panels."""

    def __init__(self, tables: Tables, figure: FigureRow) -> None:
        self._tables, self._row, self._study = tables, figure, tables.study
        self._data = observe(tables, figure)
        panels = split(self._data, figure.x, self._study)
        self._wanted = [quantity(column, self._study.phases) for column in figure.y]
        known = [panel.values for panel in panels if self._at(panel)]
        self._quantities = [
            q
            for q in self._wanted
            if any(q.column in values and values[q.column].notna().any() for values in known)
        ]
        self._several = any(len(self._at(panel)) > 1 for panel in panels)
        self._panels = [p for p in panels if not self._several or len(self._at(p)) > 1]

    def check(self, asked: bool) -> None:
        """Refuse what cannot be drawn, or is not worth drawing unasked."""
        x = self._row.x
        if not self._quantities:
            wanted = " or ".join(q.title for q in self._wanted)
            raise PlotError(f"no run has {wanted} at a known {x}")
        if not asked and not self._several:
            runs = self._data.runs
            runs = runs[taken(runs, x, self._study)]
            row = field_row(self._study.all_fields, x)
            values = ", ".join(map(row.text, sorted(runs[x].dropna().unique().tolist())))
            raise PlotError(f"no model was run with two values of {x}, only {values}")

    def draw(self, beside: Ratios | None = None, how: str = "") -> list[Figure]:
        """Draw pages of rows; a column has one unit."""
        titles = {panel.title: fold(panel.title, _TITLE_CHARACTERS) for panel in self._panels}
        rows = [(p, [series(p, q.column) for q in self._quantities]) for p in self._panels]
        columns = [[one for _, row in rows for one in row[i]] for i in range(len(self._quantities))]
        every = [one for column in columns for one in column]
        values = [v for one in every for v in one.values]
        scales = [
            q.scale(v.high for one in column for v in one.values)
            for q, column in zip(self._quantities, columns, strict=True)
        ]
        labels = [
            q.label(scale, any(v.measured for v in values))
            for q, scale in zip(self._quantities, scales, strict=True)
        ]
        names = [*(one.title for one in in_order(every)), FAILED]
        notes = [describe(values), *self._notes(), beside.how if beside else how]
        drawn = (one.values.loc[one.values[X].notna(), "path"] for one, _ in rows)
        notes.append(self._tables.provenance({path for paths in drawn for path in paths}))

        def inches(row: tuple[Panel, object]) -> float:
            return _ROW_INCHES + 0.15 * titles[row[0].title].count("\n")

        figures = []
        for page in pages(rows, inches):
            shape = len(page), len(scales) + (beside is not None)
            with sheet(dict.fromkeys(names), 0.6 + sum(map(inches, page)), shape, notes) as made:
                figure, grid, entries = made
                for axes, (panel, row) in zip(grid, page, strict=True):
                    axes[0].set_title(titles[panel.title], loc="left")
                    for i, many in enumerate(row):
                        entries |= self._lines(axes[i], many, scales[i])
                        self._finish(axes[i], panel, many, columns[i])
                        axes[i].set_ylabel(labels[i])
                    if beside is not None:
                        self._finish(axes[-1], panel, row[0], ())
                        beside.draw(axes[-1], row[0], panel)
                for ax in grid[:-1].ravel():
                    ax.set_xlabel("")
                figure.align_ylabels(grid)
            figures.append(figure)
        return figures

    @cached_property
    def _axis(self) -> Axis:
        row = field_row(self._study.all_fields, self._row.x)
        label = self._row.label or row.axis_label
        runs = self._data.runs
        if self._row.x not in runs or pd.api.types.is_numeric_dtype(runs[self._row.x]):
            return Axis(label, row.log_axis, row.text)
        texts = dict(zip(runs[X], runs[self._row.x], strict=True))
        return Axis(label, text=texts.__getitem__)

    def _at(self, panel: Panel) -> list[float]:
        """Values of the setting in a panel, runs that failed included."""
        runs = panel.runs[taken(panel.runs, self._row.x, self._study)]
        return sorted(map(float, runs[X].dropna().unique()))

    def _lines(self, ax: Axes, many: Sequence[Series], scale: Scale) -> dict[str, Any]:
        runs = self._data.runs
        along = set(runs[taken(runs, self._row.x, self._study)]["look"])
        lines = [one for one in many if one.look in along]
        levels = [one for one in many if one.look not in along]
        return draw_levels(ax, levels, scale) | draw_lines(ax, lines, scale)

    def _finish(
        self, ax: Axes, panel: Panel, many: Sequence[Series], of_column: Sequence[Series]
    ) -> None:
        watermark(ax, {one.source for one in many})
        finish(ax, self._axis, self._at(panel), of_column)

    def _notes(self) -> list[str]:
        shown = {path for panel in self._panels for path in panel.runs["path"]}
        return remarks(
            *(table[table["path"].isin(shown)] for table in (self._data.runs, self._data.failed))
        )
