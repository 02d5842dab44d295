"""Horizontal bars of one quantity: a bar an engine and value of a setting, a panel a model."""

from __future__ import annotations

from typing import NamedTuple

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from configs.naming import Namer
from configs.study import Figure as FigureRow, Study
from plots.bars import face
from plots.canvas import fold, plain, sheet, watermark
from plots.observations import X, fields_of, observe, taken
from plots.series import Panel, Value, describe, remarks, split, summarise
from plots.style import Look
from plots.tables import PlotError, Tables
from plots.units import Quantity, Scale, quantity, short

_BAR_INCHES = 0.3


class _Bar(NamedTuple):
    label: str
    look: Look
    source: str
    value: Value


def unsupported(tables: Tables, figure: FigureRow) -> str:
    """Why the figure is not worth drawing unasked; empty when it is."""
    values = observe(tables, figure).values
    known = values[values[figure.y[0]].notna()]
    if known.empty:
        return f"no run has {_shown(tables, figure).title}, or what it is worked out from"
    return "" if known[figure.x].nunique() > 1 else f"no two values of {figure.x}"


def draw(tables: Tables, figure: FigureRow) -> Figure:
    """Draw medians with quartiles, engine by engine, the largest value of the setting first.

    Raises:
        PlotError: no run has the quantity.
    """
    row, shown = figure, _shown(tables, figure)
    data = observe(tables, row)
    if data.values[shown.column].isna().all():
        raise PlotError(unsupported(tables, row))
    every = split(data, row.x, tables.study)
    panels = [(panel, _bars(panel, row.x, shown, tables.study)) for panel in every]
    panels = [(panel, bars) for panel, bars in panels if bars]
    values = [bar.value for _, bars in panels for bar in bars]
    scale = shown.scale(v.high for v in values)
    sizes = [len(bars) for _, bars in panels]
    notes = [describe(values), *remarks(data.runs, data.failed)]
    notes.append(tables.provenance(set(data.values["path"])))
    lines = sum(1 + fold(panel.title, 52).count("\n") for panel, _ in panels)
    inches = 0.7 + 0.16 * lines + sum(0.3 + _BAR_INCHES * size for size in sizes)
    layout = {"sharex": True, "gridspec_kw": {"height_ratios": sizes}}
    with sheet([], inches, (len(panels), 1), notes, **layout) as (drawn, grid, _):
        for ax, (panel, bars) in zip(grid[:, 0], panels, strict=True):
            _draw_panel(ax, bars, scale)
            ax.set_title(fold(panel.title, 52), loc="left")
            watermark(ax, {bar.source for bar in bars})
        ax.set_xlim(0, 1.12 * max(v.high for v in values) / scale.divisor)
        ax.set_xlabel(shown.label(scale).replace("\n", " "))
    return drawn


def _shown(tables: Tables, figure: FigureRow) -> Quantity:
    return quantity(figure.y[0], tables.study.phases)


def _bars(panel: Panel, x: str, shown: Quantity, study: Study) -> list[_Bar]:
    found = []
    groups = panel.values.groupby(["look", "source", X], sort=False, dropna=False)
    for (look, source, at), rows in groups:
        known = fields_of({x: rows[x].iloc[0]}, study) if taken(rows, x, study).all() else {}
        settings = (Namer(study).setting(x, value) for value in known.values())
        label = ", ".join([look.title(source), *settings])
        found += [
            (look, pd.isna(at), 0 if pd.isna(at) else -at, _Bar(label, look, source, value))
            for value in summarise(rows, "", shown.column)
        ]
    return [bar for *_, bar in sorted(found, key=lambda item: item[:3])]


def _draw_panel(ax: Axes, bars: list[_Bar], scale: Scale) -> None:
    for place, bar in enumerate(bars):
        value = bar.value
        low, median, high = (v / scale.divisor for v in (value.low, value.median, value.high))
        ax.barh(place, median, 0.7, **face(bar.look.alone, bar.source))
        ax.errorbar(
            median, place, xerr=([median - low], [high - median]), color="black", capsize=2,
            elinewidth=0.9,
        )  # fmt: skip
        ax.annotate(
            short(median), (high, place), xytext=(4, 0), textcoords="offset points", va="center",
            fontsize=8, fontweight="bold",
        )  # fmt: skip
    ax.set_yticks(range(len(bars)), [plain(bar.label) for bar in bars])
    ax.set_ylim(len(bars) - 0.5, -0.5)
    ax.grid(visible=False, axis="y")
