"""Lines with error bars over a setting that a sweep varies."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullLocator

from plots.series import Series
from plots.style import SOURCE_STYLES
from plots.units import Scale

FAILED = "ended without a time"
_LINEAR_UP_TO = 20.0
"""Ratio of the largest value to the smallest."""
_LEVEL_MARKS = (0.03, 0.97)
"""Where on the axis a level that was published has its markers, from 0 to 1."""


@dataclass(frozen=True)
class Axis:
    """The setting that a figure's x shows."""

    label: str
    is_log: bool = False
    """Values double or grow tenfold."""
    text: Callable[[float], str] = "{:g}".format


def draw_lines(ax: Axes, found: Sequence[Series], scale: Scale) -> dict[str, Any]:
    """Draw a line a series with its quartiles; returns a handle for each entry of the legend."""
    entries: dict[str, Any] = {}
    for order, one in enumerate(found):
        style = one.look.alone
        values = one.values
        if values:
            middle = [v.median / scale.divisor for v in values]
            below = [(v.median - v.low) / scale.divisor for v in values]
            above = [(v.high - v.median) / scale.divisor for v in values]
            # Others' points are not ours to join, nor have they a spread.
            hollow = SOURCE_STYLES[one.source].hollow
            spread = (below, above) if any((*below, *above)) else None
            entries[one.title] = ax.errorbar(
                [v.x for v in values], middle, yerr=spread, color=style.colour,
                linestyle="none" if hollow else style.dash, linewidth=style.width,
                marker=style.marker, markersize=style.marker_size, capsize=2.5, elinewidth=1.0,
                zorder=3 + order,
                alpha=SOURCE_STYLES[one.source].alpha,
                markerfacecolor="white" if hollow else style.colour,
            )  # fmt: skip
        if one.failed:
            height = 0.03 + 0.05 * order
            ax.plot(
                one.failed, [height] * len(one.failed), linestyle="none", marker="X",
                color=style.colour, markeredgecolor="black", markeredgewidth=0.5, markersize=6,
                transform=ax.get_xaxis_transform(), clip_on=False, zorder=9, gid="failed",
            )  # fmt: skip
            entries[FAILED] = Line2D(
                [], [], linestyle="none", marker="X", color="white", markeredgecolor="black"
            )
    return entries


def draw_levels(ax: Axes, found: Sequence[Series], scale: Scale) -> dict[str, Any]:
    """Draw a horizontal line and the band of its quartiles for engines that have no x."""
    entries: dict[str, Any] = {}
    for one in found:
        style = one.look.alone
        for value in one.values:
            if SOURCE_STYLES[one.source].hollow:
                (entries[one.title],) = ax.plot(
                    _LEVEL_MARKS, [value.median / scale.divisor] * len(_LEVEL_MARKS),
                    linestyle="none", marker=style.marker, markersize=style.marker_size,
                    color=style.colour, markerfacecolor="white", zorder=8,
                    transform=ax.get_yaxis_transform(),
                )  # fmt: skip
                continue
            low, high = value.low / scale.divisor, value.high / scale.divisor
            ax.axhspan(low, high, color=style.colour, alpha=0.18, linewidth=0, zorder=1)
            entries[one.title] = ax.axhline(
                value.median / scale.divisor, color=style.colour, linewidth=style.width, zorder=2,
                linestyle="solid" if one.look.is_reference else (0, (5, 2)),
            )  # fmt: skip
    return entries


def finish(ax: Axes, axis: Axis, at: Sequence[float], found: Sequence[Series]) -> None:
    """A tick at each value that was run, and a vertical axis from zero.

    The vertical axis is logarithmic where the largest value would press the others onto it.
    """
    if axis.is_log and at and at[0] > 0:
        ax.set_xscale("log", base=2)
    if at:
        ends = ax.transScale.transform([(value, 1.0) for value in (at[0], at[-1])])[:, 0]
        margin = 0.08 * (ends[1] - ends[0]) or 0.5
        padded = [(ends[0] - margin, 0.0), (ends[1] + margin, 0.0)]
        ax.set_xlim(*ax.transScale.inverted().transform(padded)[:, 0])
        ax.set_xticks(at, [axis.text(value) for value in at])
        ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xlabel(axis.label)
    medians = [v.median for one in found for v in one.values]
    if medians and min(medians) > 0 and max(medians) / min(medians) > _LINEAR_UP_TO:
        ax.set_yscale("log")
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ax.yaxis.set_major_formatter("{x:g}")
        ax.yaxis.set_minor_locator(NullLocator())
        ax.margins(y=0.1)
    else:
        from_zero(ax)


def from_zero(ax: Axes) -> None:
    """A vertical axis from zero to above the largest value."""
    top = ax.dataLim.y1
    ax.set_ylim(0, 1.1 * top if math.isfinite(top) and top > 0 else 1)
