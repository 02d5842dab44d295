"""Iteration breakdown: what an iteration's time goes into, engine by engine."""

from __future__ import annotations

from functools import partial

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from configs.study import Figure as FigureRow, Study
from plots.bars import (
    Bar,
    bars_of,
    draw_panels,
    has_iteration,
    iteration_ms,
    phase_face,
    phase_handles,
    phases,
)
from plots.canvas import INSIDE
from plots.observations import observe
from plots.series import describe, remarks, summarise
from plots.style import REST, ink, phase_styles
from plots.tables import MEASURED, PlotError, Tables
from plots.units import ITERATION, short

_MOST_IN_ONE_COLUMN = 4


def draw(tables: Tables, _figure: FigureRow, *, asked: bool = True) -> list[Figure]:
    """Stacked bars of the phases, a panel a case.

    Raises:
        PlotError: no run has the time of an iteration.
    """
    del asked
    data, study = observe(tables), tables.study
    values = data.values[has_iteration(data.values, study)]
    if values.empty:
        raise PlotError("no run has iterations after its warm-up: no breakdown to draw")
    panels = [(case, bars_of(rows)) for case, rows in values.groupby("case", sort=False)]
    bars = [bar for _, own in panels for bar in own]
    scale = ITERATION.scale(iteration_ms(bar.rows, study) for bar in bars)
    measured = tables.runs[tables.runs["source"] == MEASURED]
    warmups = sorted({int(n) for n in measured["warmup_iterations"].dropna()})
    counted = [v for bar in bars for v in summarise(bar.rows, "iteration_ms")]
    measured_here = any(v.measured for v in counted)
    notes = [
        describe(counted, spread=False),
        f"the first {', '.join(map(str, warmups))} left out" if warmups else "",
        "phases: median of each" if measured_here else "", *remarks(data.runs, data.failed),
        tables.provenance(set(values["path"])),
    ]  # fmt: skip
    return draw_panels(
        panels,
        partial(_draw, study=study, divisor=scale.divisor),
        lambda bar: iteration_ms(bar.rows, study) / scale.divisor,
        ITERATION.label(scale, measured_here).replace("\n", " "),
        (phase_handles(bars, study), notes),
        1 if len(panels) <= _MOST_IN_ONE_COLUMN else 2,
    )


def _draw(ax: Axes, at: float, bar: Bar, end: float, study: Study, divisor: float) -> float:
    """Draw the phases of a bar, with numbers in segments that are not narrow."""
    styles, start = phase_styles(study), 0.0
    lengths = {phase: ms / divisor for phase, ms in phases(bar.rows, study).items()}
    squeeze = min(1.0, end / sum(lengths.values()))
    for phase, value in lengths.items():
        style, length = styles[phase], value * squeeze
        ax.barh(at, length, left=start, height=0.68, **phase_face(style, bar.source))
        if phase != REST:
            box = {"boxstyle": "round,pad=0.15", "facecolor": style.colour, "linewidth": 0}
            ax.text(
                start + length / 2, at, short(value), ha="center", va="center", fontsize=7,
                color=ink(style.colour), bbox=box, gid=INSIDE,
            )  # fmt: skip
        start += length
    return start
