"""The models side by side: iteration breakdown, update throughput, time of 100 iterations."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from configs.study import Study
from plots.bars import (
    Bar,
    bars_of,
    draw_bars,
    draw_stacks,
    engine_handles,
    in_rows,
    name_bars,
    phase_handles,
    phases,
)
from plots.canvas import sheet, watermark
from plots.observations import observe
from plots.series import describe, remarks, summarise
from plots.tables import PlotError, Tables
from plots.units import ITERATION, TOTAL, UPDATE_RATE, Quantity

_PANEL_INCHES = 1.75
_NUM_ITERATIONS = 100


def unsupported(tables: Tables) -> str:
    """Why the figure is not worth drawing unasked; empty when it is."""
    values = observe(tables).values
    known = sorted({name for name in values["model"] if name})
    if not known:
        return "no run has the time of an iteration and names its model"
    return "" if len(known) > 1 else f"only one model, {known[0]}"


def draw(tables: Tables) -> Figure:
    """Three panels over groups of engines, a group a model; many models take several rows.

    Raises:
        PlotError: no run has the time of an iteration and names its model.
    """
    data = observe(tables)
    if not any(data.values["model"]):
        raise PlotError(unsupported(tables))
    rows = in_rows(bars_of(data, tables.study))
    every = [bar for row in rows for group in row for bar in group]
    shown = _shown(every)
    found = {phase for bar in every for phase in phases(bar.rows, tables.study)}
    handles = {**phase_handles(found, tables.study), **engine_handles(every)}
    values = [v for bar in every for v in summarise(bar.rows, "", "iteration_ms")]
    measured = any(v.measured for v in values)
    notes = [
        describe(values, "phases and 100 iterations: mean", bars=False),
        f"{_NUM_ITERATIONS} iterations: {_NUM_ITERATIONS} times that mean, not run",
        "update throughput: median, error bars: interquartile range" if measured else "",
        *remarks(data.runs, data.failed), tables.provenance(set(data.values["path"])),
    ]  # fmt: skip
    inches = 0.5 + len(rows) * (0.45 + len(shown) * _PANEL_INCHES)
    with sheet(handles, inches, (len(rows) * len(shown), 1), notes) as made:
        figure, grid, entries = made
        entries |= handles
        for place, ax in enumerate(grid[:, 0]):
            row, which = rows[place // len(shown)], shown[place % len(shown)]
            _panel(ax, row, which, every, tables.study)
            name_bars(ax, row, last=which is shown[-1])
            watermark(ax, {bar.source for group in row for bar in group})
    return figure


def _shown(bars: Sequence[Bar]) -> list[Quantity]:
    """The panels that the tables have values for."""
    wanted = (ITERATION, UPDATE_RATE, TOTAL)
    return [q for q in wanted if any(bar.rows[q.column].notna().any() for bar in bars)]


def _panel(
    ax: Axes, row: Sequence[list[Bar]], which: Quantity, every: Sequence[Bar], study: Study
) -> None:
    """One quantity of a row of groups, in the unit that fits the whole figure."""
    factor = float(_NUM_ITERATIONS) if which is TOTAL else 1.0
    means = [factor * bar.rows[which.column].mean() for bar in every]
    scale = which.scale(means)
    if which is ITERATION:
        draw_stacks(ax, row, scale, study)
    else:
        draw_bars(ax, row, which, scale, factor if which is TOTAL else 0.0)
    top = max((m for m in means if m == m), default=1.0) / scale.divisor
    ax.set_ylim(0, 1.25 * top)
    ax.set_ylabel(f"{which.title}\n({scale.unit})")
