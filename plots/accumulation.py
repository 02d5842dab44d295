"""Gradient accumulation: a faster update saves the same time of ever longer iterations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from plots.canvas import (
    WIDTH_INCHES,
    canvas,
    fold,
    footnote,
    heading,
    heading_inches,
    legend,
    legend_inches,
    watermark,
)
from plots.lines import FAILED, Axis, draw_lines, finish
from plots.observations import observe
from plots.series import Panel, Series, Value, series, split, titles, variants
from plots.swept import Swept, note, timed
from plots.tables import MEASURED, SIMULATED, PlotError, Tables
from plots.units import ITERATION, Scale

_AXIS = Axis("accumulation", "accumulation", "micro-batches before an update", "log")
_SWEPT = Swept(_AXIS, "accumulation", (ITERATION,))
_ROW_INCHES = 2.0
_ONE = Scale("", 1.0)


def unsupported(tables: Tables) -> str:
    """Why the figure is not worth drawing unasked; empty when it is."""
    return _SWEPT.unsupported(tables)


def draw(tables: Tables) -> Figure:
    """Iteration time against accumulation, and beside it the speed-up that comparisons allow.

    A ratio is drawn only where ``comparisons.csv`` claims it, which it does for equal results
    alone; the panel says how many others it withholds, and why.

    Raises:
        PlotError: no run has the time of an iteration at a known accumulation.
    """
    data = observe(tables)
    panels = split(data, "accumulation")
    panels = [panel for panel in panels if len(_SWEPT.at(panel)) > 1] or panels
    if data.values.empty or data.values["accumulation"].isna().all():
        raise PlotError(unsupported(tables))
    compared = _compared(tables)
    places = variants(data.runs)
    cells = [[series(panel, _AXIS.column, ITERATION, places)] for panel in panels]
    names = [*titles(cells), FAILED]
    every = [one for row in cells for one in row[0]]
    scale = ITERATION.scale(v.high for one in every for v in one.values)
    entries: dict[str, Any] = {}
    with canvas():
        height = 0.6 + legend_inches(names) + len(panels) * _ROW_INCHES
        height += heading_inches(panel.title for panel in panels)
        figure = Figure(figsize=(WIDTH_INCHES, height))
        columns = 1 if compared is None else 2
        grid = figure.subplots(len(panels), columns, squeeze=False)
        for axes, panel, (many,) in zip(grid, panels, cells, strict=True):
            entries |= draw_lines(axes[0], many, scale)
            axes[0].set_ylabel(ITERATION.label(scale))
            for column, ax in enumerate(axes):
                finish(ax, _AXIS, _SWEPT.at(panel), every if column == 0 else ())
                ax.set_xlabel(_AXIS.label if panel is panels[-1] else "")
                heading(ax, panel.title, column)
                watermark(ax, {one.source for one in many})
            if compared is not None:
                _ratios(axes[1], many, _of_panel(compared, panel))
        figure.align_ylabels(grid)
        legend(figure, {name: entries[name] for name in names if name in entries})
        how = "no comparisons" if compared is None else _how(compared)
        footnote(figure, *note(data, panels, cells), how, tables.provenance(timed(panels)))
    return figure


def _compared(tables: Tables) -> pd.DataFrame | None:
    """Comparisons of whole iterations; None when there are none."""
    try:
        table = tables.comparisons
    except PlotError:
        return None
    rows = table[table["phase"] == "iteration"].copy()
    if "source" not in rows:
        rows["source"] = MEASURED
    rows["stride"] = (
        (rows["stride"].fillna(0.0)).where(rows["engine"] == "hybrid", 0.0)
        if "stride" in rows
        else 0.0
    )
    return rows


def _how(compared: pd.DataFrame) -> str:
    if (compared["source"] == SIMULATED).all():
        return "ratio: vanilla's predicted iteration over the engine's"
    return "speed-up: ratio of medians with its interval in comparisons.csv"


def _of_panel(compared: pd.DataFrame, panel: Panel) -> pd.DataFrame:
    """Comparisons of the runs of a panel, with their accumulation."""
    keys = ["case", "engine", "stride"]
    if "offload_ratio" in compared:
        keys.append("offload_ratio")
    known = panel.runs[[*keys, "accumulation"]].drop_duplicates()
    return compared.drop(columns="accumulation", errors="ignore").merge(known, on=keys)


def _ratios(ax: Axes, many: list[Series], compared: pd.DataFrame) -> None:
    """Draw the ratios that are claimed; say of the others why not."""
    predicted = (compared["source"] == SIMULATED).any()
    claimed = compared[_claimed(compared)]
    for one in many:
        same = (claimed["engine"] == one.engine) & (claimed["stride"] == one.stride)
        rows = claimed[same & (claimed["source"] == one.source)]
        values = tuple(_value(row) for _, row in rows.sort_values("accumulation").iterrows())
        draw_lines(ax, [replace(one, values=values, failed=())], _ONE)
    ax.axhline(1.0, color="0.4", linewidth=0.8, zorder=1)
    ax.set_ylabel("predicted ratio to vanilla" if predicted else "speed-up over vanilla")
    ax.set_ylim(0, 1.15 * max([1.0, *claimed["ratio"], *claimed["ratio_high"].dropna()]))
    ax.text(
        0.97, 0.05, _withheld(compared), transform=ax.transAxes, ha="right", va="bottom",
        fontsize=7, color="0.25", zorder=12, gid="withheld",
    )  # fmt: skip


def _claimed(compared: pd.DataFrame) -> pd.Series:
    """Which comparisons claim a speed-up, those of equal results on a GPU, or predict a ratio."""
    shown = (compared["speedup"] != "") | (compared["source"] == SIMULATED)
    return shown & compared["ratio"].notna()


def _value(row: pd.Series) -> Value:
    ratio = float(row["ratio"])
    low, high = (float(row[name]) for name in ("ratio_low", "ratio_high"))
    low, high = (ratio if pd.isna(end) else end for end in (low, high))
    return Value(float(row["accumulation"]), ratio, min(low, ratio), max(high, ratio), ratio, 0, 0)


def _withheld(compared: pd.DataFrame) -> str:
    """``3 of 8 ratios withheld: ...``; empty when all are drawn."""
    rest = compared[~_claimed(compared)]
    if rest.empty:
        return "" if len(compared) else "nothing compared"
    text = f"{len(rest)} of {len(compared)} ratios withheld"
    reasons = sorted({reason for reason in rest.get("withheld", []) if reason})
    return "\n".join([text, *(fold(reason, 44) for reason in reasons[:3])])
