"""Figures of sweeps over one setting: a row a model, a column a quantity, a line an engine.

Against a field that only some engines take, the other engines are levels.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from configs.fields import field_row
from configs.study import Figure as FigureRow
from plots.canvas import fold, pages, sheet, watermark
from plots.lines import FAILED, Axis, draw_levels, draw_lines, finish
from plots.observations import X, observe, taken
from plots.ratios import Ratios
from plots.series import Panel, Series, describe, in_order, remarks, series, split
from plots.tables import PlotError, Tables
from plots.units import Scale, quantity

_ROW_INCHES = 2.0
_TITLE_CHARACTERS = 66


def draw(
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
