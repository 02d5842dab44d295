"""Horizontal bars of one quantity: a bar an engine and value of a setting, a panel a model."""

from __future__ import annotations

from dataclasses import replace

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from configs.naming import Namer
from configs.study import Figure as FigureRow, Study
from plots.bars import Bar, bars_of, draw_panels, face
from plots.observations import X, fields_of, observe, taken
from plots.series import Panel, describe, remarks, split, summarise
from plots.tables import PlotError, Tables
from plots.units import quantity


def draw(tables: Tables, figure: FigureRow, *, asked: bool = True) -> list[Figure]:
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
        (one.title, _bars(one, figure.x, shown.column, study))
        for one in split(data, figure.x, study)
    ]
    panels = [panel for panel in every if panel[1]]
    values = {id(bar): summarise(bar.rows, shown.column)[0] for _, own in panels for bar in own}
    scale = shown.scale(v.high for v in values.values())

    def bar(ax: Axes, at: float, bar: Bar, end: float) -> float:
        value = values[id(bar)]
        low, median, high = (v / scale.divisor for v in (value.low, value.median, value.high))
        ax.barh(at, min(median, end), 0.7, **face(bar.look.alone, bar.source))
        if median <= end:
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


def _bars(panel: Panel, x: str, column: str, study: Study) -> list[Bar]:
    """Bars of the observations that have a quantity, named by engine and setting."""
    rows = panel.values[panel.values[column].notna()]
    found = []
    for at, same in rows.groupby(X, dropna=False):
        known = fields_of({x: same[x].iloc[0]}, study) if taken(same, x, study).all() else {}
        words = [Namer(study).setting(x, value) for value in known.values()]
        order = float("inf") if pd.isna(at) else -at
        found += [(order, replace(b, name=", ".join([b.name, *words]))) for b in bars_of(same)]
    return [bar for _, bar in sorted(found, key=lambda item: (item[1].look, item[0]))]
