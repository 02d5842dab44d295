"""A rate or quality against what it costs: a mark a point, published ones beside."""

from __future__ import annotations

from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from configs.published import published_runs
from configs.sources import PUBLISHED
from configs.study import ResultsFigure
from plots import canvas
from plots.canvas import name_marks, sheet, watermark
from plots.data import by_setting, describe, observe, pooled
from plots.lines import line_style
from plots.style import Look
from plots.tables import PlotError, Tables
from plots.units import Quantity, quantity, short

_PANEL_INCHES = 3.0
_OTHERS = "published by others"
_WIDEST_LINEAR = 8.0
"""A largest value so many times the smallest gets a logarithmic axis."""
_HOLLOW: dict[str, Any] = {
    "linestyle": "none", "marker": "o", "color": "0.4", "markerfacecolor": "white",
    "markersize": 6.5,
}  # fmt: skip


class Mark(NamedTuple):
    """One point of a panel: the medians of its runs."""

    name: str
    """Text beside it: a letter for other settings than the first point's, or a source."""
    cost: float
    rate: float
    look: Look | None
    """None of what was published by others."""
    source: str


def draw_tradeoff(tables: Tables, figure: ResultsFigure, *, asked: bool = True) -> Figure:
    """Draw a panel for each cost that a run has.

    Raises:
        PlotError: no run has the rate and one of the costs.
    """
    del asked
    data, study = observe(tables, figure.y), tables.study
    rate, *costs = (quantity(name, study) for name in figure.y)
    others, every_setting = published_runs(study), by_setting(data, study)
    usual, letters = every_setting[0].words if every_setting else (), dict[str, str]()
    panels, values = [], []
    for cost in costs:
        marks = []
        for one in every_setting:
            of_cost, of_rate = (pooled(one.rows, name) for name in (cost.column, rate.column))
            if of_cost and of_rate:
                words = " ".join(word for word in one.words if word not in usual)
                name = letters.setdefault(words, chr(ord("a") + len(letters))) if words else ""
                marks.append(Mark(name, of_cost.median, of_rate.median, one.look, one.source))
                values.append(of_rate)
        if marks:
            rates = others.get(rate.column, {})
            both = {n: v for n, v in others.get(cost.column, {}).items() if n in rates}
            marks += [Mark(n, v, rates[n], None, PUBLISHED) for n, v in both.items()]
            panels.append((cost, marks))
    if not panels:
        raise PlotError(f"no run has {figure.y[0]} and {' or '.join(figure.y[1:]) or 'a cost'}")
    every = [mark for _, marks in panels for mark in marks]
    own = {mark.look.title(mark.source): (mark.look, mark.source) for mark in every if mark.look}
    handles = {
        name: Line2D([], [], **_style(*own[name])) for name in sorted(own, key=own.__getitem__)
    }
    notes = [describe(values).partition(";")[0], *data.remarks()]
    notes += [f"{', '.join(usual)} where no letter says else"] if usual else []
    notes += [f"{letter}: {words}" for words, letter in letters.items()]
    if any(mark.look is None for mark in every):
        handles[_OTHERS] = Line2D([], [], **_HOLLOW)
        notes.append("hollow: published by others, on other hardware and data; not measured here")
    notes.append(tables.provenance(set(data.values["path"]), of_times=True))
    shape = -(-len(panels) // 2), min(2, len(panels))
    named: list[canvas.Mark] = []
    with sheet(handles, 0.7 + _PANEL_INCHES * shape[0], shape, notes) as (made, grid):
        for ax, (cost, marks) in zip(grid.ravel(), panels, strict=False):
            named += _draw_marks(ax, marks, cost, rate)
            watermark(ax, {mark.source for mark in marks})
        for ax in grid.ravel()[len(panels) :]:
            ax.remove()
    name_marks(made, named)
    return made


def _style(look: Look, source: str) -> dict[str, Any]:
    return line_style(look, source) | {
        "linestyle": "none", "markeredgecolor": "black", "markeredgewidth": 0.4,
        "markersize": look.alone.marker_size + 1,
    }  # fmt: skip


def _draw_marks(ax: Axes, marks: list[Mark], cost: Quantity, rate: Quantity) -> list[canvas.Mark]:
    """Draw the marks of a panel; returns them with what is to stand beside them."""
    named = []
    scales = cost.scale(mark.cost for mark in marks), rate.scale(mark.rate for mark in marks)
    for mark in marks:
        at = mark.cost / scales[0].divisor, mark.rate / scales[1].divisor
        style = _style(mark.look, mark.source) if mark.look else _HOLLOW
        told = ", ".join(
            filter(None, (mark.look.title(mark.source) if mark.look else "", mark.name))
        )
        units = f"{rate.title} ({scales[1].unit}) at {cost.title} ({scales[0].unit})"
        ax.plot(*at, label=f"{told or mark.source}: {units}", **style)
        colour = "black" if mark.look else "0.4"
        named.append(canvas.Mark(ax, at, style["markersize"], mark.name, colour))
    for axis, values, label in (
        (ax.xaxis, [mark.cost for mark in marks], cost.label(scales[0], measured=False)),
        (ax.yaxis, [mark.rate for mark in marks], rate.label(scales[1], measured=False)),
    ):
        if min(values) > 0 and max(values) > _WIDEST_LINEAR * min(values):
            (ax.set_xscale if axis is ax.xaxis else ax.set_yscale)("log")
            axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            axis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
            axis.set_minor_formatter(NullFormatter())
        axis.set_label_text(label.replace("\n", " "))
    ax.margins(0.16)
    return named
