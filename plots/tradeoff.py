"""A rate against what it costs: a panel a kind of memory, a mark a point, published values beside.

The first of the figure's quantities is the rate, the others are what a panel each shows it
against. What was published comes from ``published.csv`` as in :mod:`plots.results`: a row of the
rate and a row of the other quantity with the same label are one mark, hollow and named.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from configs.naming import Namer
from configs.study import Figure as FigureRow, Study
from plots.canvas import BESIDE, plain, sheet
from plots.observations import fields_of
from plots.results import published
from plots.style import Look, Looks
from plots.tables import MEASURED, PlotError, Tables
from plots.units import Quantity, quantity, short

_PANEL_INCHES = 3.0
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


def draw(tables: Tables, figure: FigureRow, *, asked: bool = True) -> list[Figure]:
    """Draw a panel for each cost that a run has; see the registry's Draw.

    Raises:
        PlotError: the figure has no cost, or no run has the rate and one of them.
    """
    shown, usual = panels(tables, figure)
    if not shown:
        raise PlotError(f"no run has {figure.y[0]} and {' or '.join(figure.y[1:]) or 'a cost'}")
    looks = {mark.look for _, marks in shown for mark in marks if mark.look}
    legend = [f"{look.tag}: {_title(look, tables.study)}" for look in sorted(looks)]
    names = [*legend, _PUBLISHED]
    size = _PANEL_INCHES * -(-len(shown) // 2), (-(-len(shown) // 2), min(2, len(shown)))
    with sheet(names, 0.7 + size[0], size[1], _notes(tables, shown, usual)) as (
        made,
        grid,
        entries,
    ):
        rate = quantity(figure.y[0], tables.study.phases)
        for ax, (name, marks) in zip(grid.ravel(), shown, strict=False):
            _draw_panel(ax, marks, quantity(name, tables.study.phases), rate)
            for handle in ax.collections:
                entries.setdefault(handle.get_label(), handle)
        for ax in grid.ravel()[len(shown) :]:
            ax.set_axis_off()
        for look, name in zip(sorted(looks), legend, strict=True):
            entries[name] = entries.pop(look.name)
    return [made]


def panels(tables: Tables, figure: FigureRow) -> tuple[list[tuple[str, list[Mark]]], list[str]]:
    """Costs that a measured run has, each with the marks of its points and of what was published.

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


def _draw_panel(ax: Axes, marks: Sequence[Mark], cost: Quantity, rate: Quantity) -> None:
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


def _notes(
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
