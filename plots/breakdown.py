"""Iteration breakdown: what an iteration's time goes into, engine by engine."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from configs.study import Study
from plots.bars import has_iteration, phase_face, phase_handles, phases
from plots.canvas import (
    WIDTH_INCHES,
    canvas,
    cases,
    fold,
    footnote,
    legend,
    legend_inches,
    plain,
    short_label,
    unused,
    watermark,
)
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


@dataclass(frozen=True)
class _Room:
    """The horizontal axis of all panels."""

    longest: float
    divisor: float
    columns: int

    @property
    def end(self) -> float:
        """Where the axis ends: behind the number at the longest bar."""
        return self.longest * (1.06 + 0.06 * self.columns)

    @property
    def narrowest(self) -> float:
        """Length below which a segment has no room for its number."""
        return 0.075 * self.columns * self.longest


def unsupported(tables: Tables) -> str:
    """Why the figure is not worth drawing unasked; empty when it is."""
    known = has_iteration(observe(tables).values, tables.study).any()
    return "" if known else "no run has iterations after its warm-up"


def draw(tables: Tables) -> Figure:
    """Stacked bars of forward, backward and update, a panel a case, on one scale.

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
    with canvas():
        figure, axes, columns = _panels(panels, handles)
        room = _Room(longest / scale.divisor, scale.divisor, columns)
        for place, (ax, panel) in enumerate(zip(axes, panels, strict=False)):
            first = place - place % columns
            slots = max(len(beside) for beside in panels[first : first + columns])
            _panel(ax, panel, slots, room, study)
            text = fold(panel[0].case, _TITLE_CHARACTERS[columns])
            ax.set_title(text, loc="left", fontsize=9 if columns == 1 else 7.5)
            ax.tick_params(axis="y", labelsize=8 if columns == 1 else 7)
            watermark(ax, {bar.source for bar in panel}, size=22 if columns == 1 else 14)
            below = place + columns >= len(panels)
            ax.tick_params(axis="x", labelbottom=below)
            if below:
                ax.set_xlabel(f"mean iteration ({scale.unit})")
        unused(list(axes[len(panels) :]))
        legend(figure, handles)
        values = [v for bar in bars for v in summarise(bar.rows, "", "iteration_ms")]
        measured = tables.runs[tables.runs["source"] == MEASURED]
        warmups = sorted({int(n) for n in measured["warmup_iterations"].dropna()})
        footnote(
            figure, describe(values, "mean", bars=False),
            f"the first {', '.join(map(str, warmups))} left out" if warmups else "",
            f"{len(every) - len(shown)} more cases not drawn" if len(every) > len(shown) else "",
            *remarks(data.runs, data.failed), tables.provenance(set(data.values["path"])),
        )  # fmt: skip
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


def _panels(panels: list[list[_Row]], legends: Iterable[str]) -> tuple[Figure, list[Axes], int]:
    """A column of panels as high as they have bars, or two columns of many."""
    columns = 1 if len(panels) <= _MOST_IN_ONE_COLUMN else 2
    rows = [panels[at : at + columns] for at in range(0, len(panels), columns)]
    most = [max(map(len, row)) for row in rows]
    width = _TITLE_CHARACTERS[columns]
    lines = [max(1 + fold(panel[0].case, width).count("\n") for panel in row) for row in rows]
    height = 0.85 + legend_inches(legends)
    height += sum(0.2 + 0.16 * n for n in lines) + _BAR_INCHES * sum(most)
    figure = Figure(figsize=(WIDTH_INCHES, height))
    grid = figure.subplots(
        len(rows), columns, sharex=True, squeeze=False, gridspec_kw={"height_ratios": most}
    )
    return figure, list(grid.ravel()), columns


def _panel(ax: Axes, panel: list[_Row], slots: int, room: _Room, study: Study) -> None:
    """Draw the bars of a case from above; ``slots`` keeps bars of neighbours equally thick."""
    styles = phase_styles(study)
    for position, bar in enumerate(panel):
        start = 0.0
        for phase, milliseconds in phases(bar.rows, study).items():
            style, length = styles[phase], milliseconds / room.divisor
            ax.barh(position, length, left=start, height=0.68, **phase_face(style, bar.source))
            if length > room.narrowest and phase != REST:
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
    ax.set_ylim(slots - 0.5, -0.5)
    ax.set_xlim(0, room.end)
    ax.grid(visible=False, axis="y")
