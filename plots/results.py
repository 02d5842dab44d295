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
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from configs.errors import ConfigError
from configs.naming import Namer
from configs.study import Figure as FigureRow, Study, load_study
from plots.canvas import BESIDE, canvas, fold, plain, sheet
from plots.data import fields_of
from plots.style import Look, Looks
from plots.tables import MEASURED, PUBLISHED, PlotError, Tables
from plots.units import Quantity, quantity, short

WIDTH_INCHES = 6.4
_RESULT_BAR_INCHES = 0.22
_RESULT_INCHES = 0.75
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


def draw_results(tables: Tables, figure: FigureRow, *, asked: bool = True) -> list[Figure]:
    """Draw a panel for each of the figure's quantities that a run has; see the registry's Draw.

    Raises:
        PlotError: no run has any of them.
    """
    shown = panels(tables, figure)
    if not shown:
        raise PlotError(f"no run has {' or '.join(figure.y)}")
    heights = [_RESULT_INCHES + _RESULT_BAR_INCHES * len(bars) for _, bars in shown]
    with canvas():
        made = Figure(figsize=(WIDTH_INCHES, 0.6 + sum(heights)))
        grid = made.subplots(len(shown), 1, squeeze=False, gridspec_kw={"height_ratios": heights})[
            :, 0
        ]
        for ax, (name, bars) in zip(grid, shown, strict=True):
            _draw_result(ax, name, bars, tables.study)
        made.supxlabel(
            textwrap.fill(plain(_results_note(tables, shown)), _NOTE_CHARACTERS),
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


def _draw_result(ax: Axes, name: str, bars: Sequence[Bar], study: Study) -> None:
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


def _results_note(tables: Tables, shown: Sequence[tuple[str, Sequence[Bar]]]) -> str:
    counts = {len(bar.values) for _, bars in shown for bar in bars if bar.source == MEASURED}
    runs = "-".join(str(n) for n in sorted({min(counts), max(counts)}))
    parts = [f"median of n={runs} runs; error bars: least and most"]
    if any(bar.source == PUBLISHED for _, bars in shown for bar in bars):
        parts.append("hollow: published by others on other hardware and data, not measured here")
    measured = tables.runs[tables.runs["source"] == MEASURED]
    return " · ".join([*parts, tables.provenance(measured["path"])])


_MARKS_INCHES = 3.0
_PUBLISHED = "published by others"
_DERIVED = ("accumulation",)
"""Settings that follow from others that vary with them."""
_WIDEST_LINEAR = 8.0
"""A largest value so many times the smallest gets a logarithmic axis."""


class Mark(NamedTuple):
    """One point of a panel: the median of its runs."""

    name: str
    """What stands beside it."""
    cost: float
    rate: float
    look: Look | None
    """None of what was published."""
    num_runs: int = 1


def draw_tradeoff(tables: Tables, figure: FigureRow, *, asked: bool = True) -> list[Figure]:
    """Draw a panel for each cost that a run has; see the registry's Draw.

    Raises:
        PlotError: the figure has no cost, or no run has the rate and one of them.
    """
    shown, usual = mark_panels(tables, figure)
    if not shown:
        raise PlotError(f"no run has {figure.y[0]} and {' or '.join(figure.y[1:]) or 'a cost'}")
    looks = {mark.look for _, marks in shown for mark in marks if mark.look}
    legend = [f"{look.tag}: {_title(look, tables.study)}" for look in sorted(looks)]
    names = [*legend, _PUBLISHED]
    size = _MARKS_INCHES * -(-len(shown) // 2), (-(-len(shown) // 2), min(2, len(shown)))
    with sheet(names, 0.7 + size[0], size[1], _marks_notes(tables, shown, usual)) as (
        made,
        grid,
        entries,
    ):
        rate = quantity(figure.y[0], tables.study.phases)
        for ax, (name, marks) in zip(grid.ravel(), shown, strict=False):
            _draw_marks(ax, marks, quantity(name, tables.study.phases), rate)
            for handle in ax.collections:
                entries.setdefault(handle.get_label(), handle)
        for ax in grid.ravel()[len(shown) :]:
            ax.set_axis_off()
        for look, name in zip(sorted(looks), legend, strict=True):
            entries[name] = entries.pop(look.name)
    return [made]


def mark_panels(
    tables: Tables, figure: FigureRow
) -> tuple[list[tuple[str, list[Mark]]], list[str]]:
    """Return the costs that a measured run has, each with the marks of its points and of others'.

    A mark is named by its engine's tag, and by the settings in which its point differs from the
    first one's; those are given beside the panels.
    """
    rate, *costs = figure.y
    runs, namer = tables.runs, Namer(tables.study)
    known = runs[(runs["source"] == MEASURED) & runs.get(rate, pd.Series(dtype=float)).notna()]
    fields = [fields_of(row, tables.study) for row in known.to_dict("records")]
    looks = Looks(tables.study, fields)
    varying = [name for name in namer.varying(fields) if name not in _DERIVED]
    first = fields[0] if fields else {}
    usual = [namer.setting(name, first[name]) for name in varying if name in first]
    others = published(tables.study)
    rates = {bar.label: bar.middle for bar in others.get(rate, [])}
    found = []
    for cost in costs:
        marks: list[Mark] = []
        rows = known[known[cost].notna()] if cost in known else known.iloc[:0]
        for _, group in rows.groupby("point", sort=False):
            row = fields_of(group.iloc[0], tables.study)
            settings = [namer.setting(key, row[key]) for key in varying if key in row]
            look = looks.of(row)
            name = " ".join([look.tag, *(text for text in settings if text not in usual)])
            middle = {column: float(group[column].median()) for column in (cost, rate)}
            marks.append(Mark(name, middle[cost], middle[rate], look, group["path"].nunique()))
        if marks:
            bars = [bar for bar in others.get(cost, []) if bar.label in rates]
            marks += [Mark(bar.label, bar.middle, rates[bar.label], None) for bar in bars]
            found.append((cost, marks))
    return found, usual


def _draw_marks(ax: Axes, marks: Sequence[Mark], cost: Quantity, rate: Quantity) -> None:
    scales = cost.scale(m.cost for m in marks), rate.scale(m.rate for m in marks)
    for mark in marks:
        style = mark.look.alone if mark.look else None
        at = mark.cost / scales[0].divisor, mark.rate / scales[1].divisor
        ax.scatter(
            [at[0]], [at[1]],
            s=42 if style is None else (style.marker_size + 1) ** 2,
            marker="o" if style is None else style.marker,
            facecolor="white" if style is None else style.colour,
            edgecolor="0.4" if style is None else "black",
            linewidth=1.0 if style is None else 0.4,
            label=_PUBLISHED if mark.look is None else mark.look.name,
            zorder=3,
        )  # fmt: skip
        ax.annotate(
            plain(mark.name.removeprefix("published: ")), at, xytext=(0, 0),
            textcoords="offset points", fontsize=5.5, gid=BESIDE,
            color="0.4" if style is None else "black",
        )  # fmt: skip
    for axis, values, label in (
        (ax.xaxis, [m.cost for m in marks], cost.label(scales[0], measured=False)),
        (ax.yaxis, [m.rate for m in marks], rate.label(scales[1], measured=False)),
    ):
        if min(values) > 0 and max(values) > _WIDEST_LINEAR * min(values):
            (ax.set_xscale if axis is ax.xaxis else ax.set_yscale)("log")
            axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            axis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
            axis.set_minor_formatter(NullFormatter())
        axis.set_label_text(label.replace("\n", " "))
    ax.margins(0.16)


def _title(look: Look, study: Study) -> str:
    row = study.engines.get(str(look.key[1]))
    return row.title if row else look.name


def _marks_notes(
    tables: Tables, shown: Sequence[tuple[str, Sequence[Mark]]], usual: Sequence[str]
) -> list[str]:
    """What the marks are and where they come from."""
    marks = [mark for _, found in shown for mark in found]
    counts = {mark.num_runs for mark in marks if mark.look}
    notes = ["a mark a point" if counts == {1} else "a mark a point, the median of its runs"]
    notes += [f"{', '.join(usual)} where a mark says nothing else"] if usual else []
    notes.append("names without room are left out")
    if all(name not in tables.study.results for name, _ in shown):
        notes.append("rate of the median iteration after the warm-up, cost at its peak")
    if any(mark.look is None for mark in marks):
        notes.append("hollow: published by others, on other hardware and data; not measured here")
    return [*notes, tables.provenance(tables.runs.loc[tables.runs["source"] == MEASURED, "path"])]
