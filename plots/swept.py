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
from plots.canvas import heading, heading_inches, sheet, watermark
from plots.lines import FAILED, Axis, draw_levels, draw_lines, finish
from plots.observations import X, observe, taken
from plots.ratios import Ratios
from plots.series import Panel, Series, describe, remarks, series, split, titles
from plots.tables import PlotError, Tables
from plots.units import Scale, quantity

_ROW_INCHES = 2.0


def unsupported(tables: Tables, figure: FigureRow) -> str:
    """Why the figure is not worth drawing unasked; empty when it is."""
    return _Swept(tables, figure).unsupported()


def draw(tables: Tables, figure: FigureRow, *, with_ratios: bool = False) -> Figure:
    """Draw quantities against a setting, be it of one value alone.

    Args:
        tables: What to draw.
        figure: Its ``x`` and ``y``.
        with_ratios: Draw beside them what ``comparisons.csv`` says of the first.

    Raises:
        PlotError: no run has both the setting and one of the quantities.
    """
    swept = _Swept(tables, figure)
    if not swept.quantities:
        raise PlotError(swept.unsupported())
    return swept.draw(Ratios.of(tables, figure.y[0]) if with_ratios else None)


class _Swept:
    """The observations of one figure, in panels."""

    def __init__(self, tables: Tables, figure: FigureRow) -> None:
        self._tables, self._row, self._study = tables, figure, tables.study
        self._data = observe(tables, figure)
        panels = split(self._data, figure.x, self._study)
        known = [quantity(column, self._study.phases) for column in figure.y]
        self._wanted = known
        self.quantities = [
            q
            for q in known
            if any(self._at(p) and p.values[q.column].notna().any() for p in panels)
        ]
        self._several = any(len(self._at(panel)) > 1 for panel in panels)
        self._panels = [p for p in panels if not self._several or len(self._at(p)) > 1]

    def unsupported(self) -> str:
        """Why the figure is not worth drawing; empty when it is."""
        x = self._row.x
        if not self.quantities:
            return f"no run has {' or '.join(q.title for q in self._wanted)} at a known {x}"
        if self._several:
            return ""
        runs = self._data.runs
        runs = runs[taken(runs, x, self._study)]
        row = field_row(self._study.all_fields, x)
        values = ", ".join(map(row.text, sorted(runs[x].dropna().unique().tolist())))
        return f"no model was run with two values of {x}, only {values}"

    def draw(self, ratios: Ratios | None) -> Figure:
        panels = self._panels
        cells = [[series(panel, q) for q in self.quantities] for panel in panels]
        beside = ratios if ratios is not None and ratios.known else None
        how = ratios.how if ratios else ""
        shape = len(panels), len(self.quantities) + (beside is not None)
        inches = 0.6 + len(panels) * _ROW_INCHES
        inches += heading_inches(panel.title for panel in panels)
        with sheet([*titles(cells), FAILED], inches, shape, self._notes(cells, how)) as made:
            figure, grid, entries = made
            for column, shown in enumerate(self.quantities):
                every = [one for row in cells for one in row[column]]
                scale = shown.scale(v.high for one in every for v in one.values)
                for ax, panel, row in zip(grid[:, column], panels, cells, strict=True):
                    entries |= self._lines(ax, row[column], scale)
                    self._finish(ax, panel, row[column], column, every)
                    ax.set_ylabel(shown.label(scale))
            for ax, panel, row in zip(grid[:, -1], panels, cells, strict=True):
                if beside is not None:
                    self._finish(ax, panel, row[0], len(self.quantities), ())
                    beside.draw(ax, row[0], panel)
            figure.align_ylabels(grid)
        return figure

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
        self, ax: Axes, panel: Panel, many: Sequence[Series], column: int, every: Sequence[Series]
    ) -> None:
        watermark(ax, {one.source for one in many})
        finish(ax, self._axis, self._at(panel), every)
        if panel is not self._panels[-1]:
            ax.set_xlabel("")
        heading(ax, panel.title, column)

    def _notes(self, cells: Sequence[Sequence[list[Series]]], how: str) -> list[str]:
        shown = {path for panel in self._panels for path in panel.runs["path"]}
        timed = {path for panel in self._panels for path in panel.values["path"]}
        values = [v for row in cells for many in row for one in many for v in one.values]
        runs, failed = (
            table[table["path"].isin(shown)] for table in (self._data.runs, self._data.failed)
        )
        where = self._tables.provenance(timed)
        return [describe(values), *remarks(runs, failed), how, where]
