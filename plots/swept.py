"""Figures of sweeps over one setting: a row a model, a column a quantity, a line an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from plots.canvas import (
    WIDTH_INCHES,
    canvas,
    footnote,
    heading,
    heading_inches,
    legend,
    legend_inches,
    watermark,
)
from plots.lines import FAILED, Axis, draw_levels, draw_lines, finish
from plots.observations import Observations, observe
from plots.series import Panel, Series, describe, remarks, series, split, titles, variants
from plots.tables import PlotError, Tables
from plots.units import ITERATION, SAMPLES, TFLOPS, UPDATE, UPDATE_RATE, Quantity, Scale, count

_ROW_INCHES = 2.0
_STRIDE = "stride"


@dataclass(frozen=True)
class Swept:
    """A figure of quantities against a setting; against the stride, engines without are levels."""

    axis: Axis
    setting: str
    """Field of a point that the sweep varies."""
    quantities: tuple[Quantity, ...]

    def unsupported(self, tables: Tables) -> str:
        """Why the figure is not worth drawing unasked; empty when it is."""
        panels = split(observe(tables), self.setting)
        if not self._columns(panels):
            names = " or ".join(quantity.title for quantity in self.quantities)
            return f"no run has {names} at a known {self.axis.name}"
        if any(len(self.at(panel)) > 1 for panel in panels):
            return ""
        values = [self.axis.text(x) for x in sorted({x for p in panels for x in self.at(p)})]
        return f"no model was run with two values of the {self.axis.name}, only {', '.join(values)}"

    def draw(self, tables: Tables) -> Figure:
        """Draw the figure, be it of one value alone.

        Raises:
            PlotError: no run has both the setting and one of the quantities.
        """
        data = observe(tables)
        panels = split(data, self.setting)
        panels = [panel for panel in panels if len(self.at(panel)) > 1] or panels
        columns = self._columns(panels)
        if not columns:
            raise PlotError(self.unsupported(tables))
        places = variants(data.runs)
        cells = [[series(p, self.axis.column, q, places) for q in columns] for p in panels]
        with canvas():
            figure = self._figure(panels, columns, cells)
            footnote(figure, *note(data, panels, cells), tables.provenance(timed(panels)))
        return figure

    def at(self, panel: Panel) -> list[float]:
        """Values of the setting in a panel, runs that failed included."""
        runs = panel.runs[panel.runs["engine"] == "hybrid"] if self._strides else panel.runs
        return sorted(runs[self.axis.column].dropna().unique())

    @property
    def _strides(self) -> bool:
        return self.axis.column == _STRIDE

    def _columns(self, panels: Sequence[Panel]) -> list[Quantity]:
        """Quantities of which the tables hold a value."""
        return [
            quantity
            for quantity in self.quantities
            if any(
                self.at(panel) and panel.values[quantity.column].notna().any() for panel in panels
            )
        ]

    def _figure(
        self,
        panels: Sequence[Panel],
        columns: Sequence[Quantity],
        cells: Sequence[Sequence[list[Series]]],
    ) -> Figure:
        names = [*titles(cells), FAILED]
        height = 0.6 + legend_inches(names) + len(panels) * _ROW_INCHES
        height += heading_inches(panel.title for panel in panels)
        figure = Figure(figsize=(WIDTH_INCHES, height))
        grid = figure.subplots(len(panels), len(columns), squeeze=False)
        entries: dict[str, Any] = {}
        for column, quantity in enumerate(columns):
            every = [one for row in cells for one in row[column]]
            scale = quantity.scale(v.high for one in every for v in one.values)
            for row, panel in enumerate(panels):
                ax = grid[row, column]
                entries |= self._panel(ax, cells[row][column], scale)
                finish(ax, self.axis, self.at(panel), every)
                ax.set_xlabel(self.axis.label if panel is panels[-1] else "")
                ax.set_ylabel(quantity.label(scale))
                heading(ax, panel.title, column)
        figure.align_ylabels(grid)
        legend(figure, {name: entries[name] for name in names if name in entries})
        return figure

    def _panel(self, ax: Axes, many: Sequence[Series], scale: Scale) -> dict[str, Any]:
        lines = [one for one in many if not self._strides or one.engine == "hybrid"]
        levels = [one for one in many if one not in lines]
        watermark(ax, {one.source for one in many})
        return draw_levels(ax, levels, scale) | draw_lines(ax, lines, scale)


def timed(panels: Sequence[Panel]) -> set[str]:
    """Paths of the runs that panels show."""
    return {path for panel in panels for path in panel.values["path"]}


def note(
    data: Observations, panels: Sequence[Panel], cells: Sequence[Sequence[list[Series]]]
) -> list[str]:
    """Footnote of panels of medians."""
    shown = {path for panel in panels for path in panel.runs["path"]}
    values = [v for row in cells for many in row for one in many for v in one.values]
    runs, failed = (t[t["path"].isin(shown)] for t in (data.runs, data.failed))
    return [describe(values), *remarks(runs, failed)]


FIGURES = {
    "stride": Swept(
        Axis("stride", "stride", "stride k: one subgroup in k on the GPU"),
        "stride", (UPDATE_RATE, ITERATION),
    ),
    "micro-batch": Swept(
        Axis("micro_batch_size", "micro-batch", "micro-batch (samples)", "log"),
        "micro_batch_size", (ITERATION, TFLOPS),
    ),
    "subgroup-size": Swept(
        Axis("subgroup_numel", "subgroup size", "subgroup size (elements)", "log", count),
        "subgroup_numel", (UPDATE, ITERATION),
    ),
    "data-parallel": Swept(
        Axis("dp", "data-parallel degree", "data-parallel ranks", "log"),
        "dp", (ITERATION, SAMPLES),
    ),
    "offload-ratio": Swept(
        Axis("resident_share", "resident share", "share of the state on the device"),
        "offload_ratio", (ITERATION, UPDATE),
    ),
    "gpu-hogging": Swept(
        Axis("hog_share", "share taken", "share of the device's time taken"),
        "hog_share", (ITERATION, UPDATE),
    ),
}  # fmt: skip
