"""Results of whole runs as bars: a panel a quantity, a bar an engine, published values beside.

What was published comes from ``published.csv`` of the study's folder, with columns ``label``,
``quantity`` and ``value``; its bars are hollow and say that they were published.
"""

from __future__ import annotations

import contextlib
import csv
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from configs.errors import ConfigError
from configs.naming import Namer
from configs.study import Figure as FigureRow, Study, load_study
from plots.canvas import canvas, fold, plain
from plots.tables import MEASURED, PUBLISHED, PlotError, Tables
from plots.units import quantity, short

WIDTH_INCHES = 6.4
_BAR_INCHES = 0.22
_PANEL_INCHES = 0.75
_LABEL_CHARACTERS = 40
_NOTE_CHARACTERS = 100
_GREY = "#999999"


class Bar(NamedTuple):
    """One value of a panel."""

    label: str
    values: tuple[float, ...]
    """One a run."""
    source: str
    """``measured`` or ``published``."""
    colour: str
    hatch: str = ""

    @property
    def middle(self) -> float:
        """Median of the runs."""
        return float(pd.Series(self.values).median())


def draw(tables: Tables, figure: FigureRow, *, asked: bool = True) -> list[Figure]:
    """Draw a panel for each of the figure's quantities that a run has; see the registry's Draw.

    Raises:
        PlotError: no run has any of them.
    """
    shown = panels(tables, figure)
    if not shown:
        raise PlotError(f"no run has {' or '.join(figure.y)}")
    heights = [_PANEL_INCHES + _BAR_INCHES * len(bars) for _, bars in shown]
    with canvas():
        made = Figure(figsize=(WIDTH_INCHES, 0.6 + sum(heights)))
        grid = made.subplots(len(shown), 1, squeeze=False, gridspec_kw={"height_ratios": heights})[
            :, 0
        ]
        for ax, (name, bars) in zip(grid, shown, strict=True):
            _draw_panel(ax, name, bars, tables.study)
        made.supxlabel(
            textwrap.fill(plain(_note(tables, shown)), _NOTE_CHARACTERS),
            fontsize=7,
            color="0.35",
            x=0.01,
            ha="left",
        )
    return [made]


def panels(tables: Tables, figure: FigureRow) -> list[tuple[str, list[Bar]]]:
    """Quantities that a run has, each with the bars of its engines and of what was published."""
    every = published(tables.study)
    found = []
    for name in figure.y:
        bars = _measured(tables, name)
        if bars:
            found.append((name, bars + every.get(name, [])))
    return found


def published(study: Study) -> dict[str, list[Bar]]:
    """Published bars by their quantity; none for a study whose folder is not known here.

    Raises:
        PlotError: the file is of another form.
    """
    path = _folder(study) / "published.csv"
    if not path.is_file():
        return {}
    lines = [
        line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#")
    ]
    found: dict[str, list[Bar]] = {}
    for row in csv.DictReader(lines):
        try:
            bar = Bar(f"published: {row['label']}", (float(row["value"]),), PUBLISHED, _GREY)
            found.setdefault(row["quantity"], []).append(bar)
        except (KeyError, TypeError, ValueError):
            raise PlotError(
                f"{path}: {row}: give label, quantity and a value that is a number"
            ) from None
    return found


def _folder(study: Study) -> Path:
    """Of a study that came with runs: that of the shipped study which it is, else none."""
    with contextlib.suppress(ConfigError):
        shipped = load_study(study.name)
        if (shipped.title, shipped.source) == (study.title, study.source) and shipped.folder:
            return shipped.folder
    return study.folder or Path("no folder")


def _measured(tables: Tables, name: str) -> list[Bar]:
    runs, study = tables.runs, tables.study
    if name not in runs:
        return []
    known = runs[runs[name].notna() & (runs["source"] == MEASURED)]
    layout = [field for field in ("pp", "dp") if known[field].nunique() > 1]
    namer, bars = Namer(study), []
    for engine, row in study.engines.items():
        of_engine, style = known[known["engine"] == engine], row.style
        own = [field for field in row.fields if field in of_engine]
        told = [*layout, *(field for field in own if of_engine[field].nunique() > 1)]
        # Without a field that tells them apart all runs of an engine are one bar.
        groups = of_engine.groupby(told, dropna=False) if told else [((), of_engine)]
        for values, group in groups:
            words = [namer.setting(*both) for both in zip(told, values, strict=True)]
            numbers = tuple(map(float, group[name]))
            label = ", ".join([row.title, *words])
            if numbers:
                bars.append(Bar(label, numbers, MEASURED, style.colour or _GREY, style.hatch))
    return bars


def _draw_panel(ax: Axes, name: str, bars: Sequence[Bar], study: Study) -> None:
    shown = quantity(name, study.phases)
    scale = shown.scale(value for bar in bars for value in bar.values)
    top = max(value for bar in bars for value in bar.values) / scale.divisor
    for place, bar in enumerate(bars):
        values = [value / scale.divisor for value in bar.values]
        middle = bar.middle / scale.divisor
        hollow = bar.source == PUBLISHED
        ax.barh(
            place,
            middle,
            0.7,
            facecolor="white" if hollow else bar.colour,
            edgecolor="0.3" if hollow else "black",
            hatch=bar.hatch,
            linewidth=1.2 if hollow else 0.5,
        )
        if len(values) > 1:
            reach = [middle - min(values)], [max(values) - middle]
            ax.errorbar(middle, place, xerr=reach, color="black", capsize=2, elinewidth=0.9)
        ax.annotate(
            short(middle),
            (max(values), place),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=7,
        )
    ax.set_yticks(
        range(len(bars)), [plain(fold(bar.label, _LABEL_CHARACTERS)) for bar in bars], fontsize=7
    )
    ax.set_ylim(len(bars) - 0.5, -0.5)
    ax.set_xlim(0, 1.15 * top)
    title = study.results.get(name, shown.title)
    unit = f" ({scale.unit})" if scale.unit else ""
    ax.set_title(plain(title + unit), loc="left", fontsize=8)
    ax.grid(visible=False, axis="y")


def _note(tables: Tables, shown: Sequence[tuple[str, Sequence[Bar]]]) -> str:
    counts = {len(bar.values) for _, bars in shown for bar in bars if bar.source == MEASURED}
    runs = "-".join(str(n) for n in sorted({min(counts), max(counts)}))
    parts = [f"median of n={runs} runs; error bars: least and most"]
    if any(bar.source == PUBLISHED for _, bars in shown for bar in bars):
        parts.append("hollow: published by others on other hardware and data, not measured here")
    measured = tables.runs[tables.runs["source"] == MEASURED]
    return " · ".join([*parts, tables.provenance(measured["path"])])
