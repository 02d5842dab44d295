"""Iteration breakdown: what an iteration's time goes into, engine by engine."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from configs.study import Study
from plots.bars import has_iteration, phase_face, phase_handles, phases
from plots.canvas import cases, fold, plain, sheet, short_label, watermark
from plots.observations import observe
from plots.series import describe, remarks, summarise
from plots.style import REST, ink, phase_styles
from plots.tables import MEASURED, PlotError, Tables
from plots.units import ITERATION, short

_BAR_INCHES = 0.36
_TITLE_CHARACTERS = {1: 66, 2: 31}
"""Of a line above a panel, by the number of columns."""
_MOST_IN_ONE_COLUMN = 4
_MOST_PANELS = 40


@dataclass(frozen=True)
class _Row:
    """One bar: all repeats of a point."""

    case: str
    label: str
    source: str
    rows: pd.DataFrame


def unsupported(tables: Tables) -> str:
    """Why the figure is not worth drawing unasked; empty when it is."""
    known = has_iteration(observe(tables).values, tables.study).any()
    return "" if known else "no run has iterations after its warm-up"


def draw(tables: Tables) -> Figure:
    """Stacked bars of the phases, a panel a case, on one scale.

    Raises:
        PlotError: no run has the time of an iteration.
    """
    data, study = observe(tables), tables.study
    bars = _bars(data.values[has_iteration(data.values, study)])
    if not bars:
        raise PlotError("no run has iterations after its warm-up: no breakdown to draw")
    every = list(dict.fromkeys(bar.case for bar in bars))
    shown = every[:_MOST_PANELS]
    panels = [[bar for bar in bars if bar.case == case] for case in shown]
    longest = max(sum(phases(bar.rows, study).values()) for bar in bars)
    scale = ITERATION.scale([longest])
    found = {phase for bar in bars for phase in phases(bar.rows, study)}
    handles = phase_handles(found, study)
    values = [v for bar in bars for v in summarise(bar.rows, "", "iteration_ms")]
    measured = tables.runs[tables.runs["source"] == MEASURED]
    warmups = sorted({int(n) for n in measured["warmup_iterations"].dropna()})
    notes = [
        describe(values, "mean", bars=False),
        f"the first {', '.join(map(str, warmups))} left out" if warmups else "",
        f"{len(every) - len(shown)} more cases not drawn" if len(every) > len(shown) else "",
        *remarks(data.runs, data.failed), tables.provenance(set(data.values["path"])),
    ]  # fmt: skip
    columns = 1 if len(panels) <= _MOST_IN_ONE_COLUMN else 2
    rows = [panels[at : at + columns] for at in range(0, len(panels), columns)]
    slots = [max(map(len, row)) for row in rows]
    width = _TITLE_CHARACTERS[columns]
    lines = [max(1 + fold(panel[0].case, width).count("\n") for panel in row) for row in rows]
    inches = 0.85 + sum(0.2 + 0.16 * n for n in lines) + _BAR_INCHES * sum(slots)
    layout = {"sharex": True, "gridspec_kw": {"height_ratios": slots}}
    with sheet(handles, inches, (len(rows), columns), notes, **layout) as made:
        figure, grid, entries = made
        entries |= handles
        for place, (ax, panel) in enumerate(itertools.zip_longest(grid.ravel(), panels)):
            if panel is None:
                ax.remove()
                continue
            _panel(ax, panel, scale.divisor, 0.075 * columns * longest, study)
            ax.set_ylim(slots[place // columns] - 0.5, -0.5)  # bars of neighbours equally thick
            ax.set_xlim(0, longest / scale.divisor * (1.06 + 0.06 * columns))
            text = fold(panel[0].case, width)
            ax.set_title(text, loc="left", fontsize=9 if columns == 1 else 7.5)
            ax.tick_params(axis="y", labelsize=8 if columns == 1 else 7)
            watermark(ax, {bar.source for bar in panel}, size=22 if columns == 1 else 14)
            below = place + columns >= len(panels)
            ax.tick_params(axis="x", labelbottom=below)
            if below:
                ax.set_xlabel(f"mean iteration ({scale.unit})")
    return figure


def _bars(values: pd.DataFrame) -> list[_Row]:
    """One bar a point and case; runs that do not say which point they are stay apart."""
    key = values["point_key"].where(values["point_key"] != "", values["path"] + values["label"])
    found = []
    for case in cases(values):
        inside = values[values["case"] == case]
        groups = [rows for _, rows in inside.groupby(key[inside.index], sort=False)]
        groups.sort(key=lambda rows: rows["look"].iloc[0])
        for rows in groups:
            label, source = rows["label"].iloc[0], rows["source"].iloc[0]
            name = short_label(label, case)
            found.append(_Row(case, _sourced(name, source), source, rows))
    return found


def _sourced(name: str, source: str) -> str:
    return name if source == MEASURED else plain(f"{name}, {source}")


def _panel(ax: Axes, panel: list[_Row], divisor: float, narrow_ms: float, study: Study) -> None:
    """Draw the bars of a case from above, with numbers in segments that are not narrow."""
    styles = phase_styles(study)
    for position, bar in enumerate(panel):
        start = 0.0
        for phase, milliseconds in phases(bar.rows, study).items():
            style, length = styles[phase], milliseconds / divisor
            ax.barh(position, length, left=start, height=0.68, **phase_face(style, bar.source))
            if milliseconds > narrow_ms and phase != REST:
                box = {"boxstyle": "round,pad=0.15", "facecolor": style.colour, "linewidth": 0}
                ax.text(
                    start + length / 2, position, short(length), ha="center", va="center",
                    fontsize=7, color=ink(style.colour), bbox=box,
                )  # fmt: skip
            start += length
        ax.annotate(
            short(start), (start, position), xytext=(4, 0), textcoords="offset points",
            va="center", fontsize=8, fontweight="bold",
        )  # fmt: skip
    ax.set_yticks(range(len(panel)), [bar.label for bar in panel])
    ax.grid(visible=False, axis="y")
