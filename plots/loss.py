"""Loss curves over each other: equal runs must be seen to be equal, not to hide each other."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from configs.study import Style
from plots.canvas import cases, fold, sheet, short_label, watermark
from plots.style import SOURCE_STYLES, Looks
from plots.tables import MEASURED, PlotError, Tables

_PANEL_INCHES = 2.5


def unsupported(tables: Tables) -> str:
    """Why the figure is not worth drawing unasked; empty when it is."""
    return "" if tables.iterations["loss_known"].any() else "no run has a loss"


def draw(tables: Tables) -> Figure:
    """Loss against iteration, a panel a case, a line a run.

    Runs that coincide stay apart by width: the reference is wide and drawn first. An iteration
    whose loss is NaN or infinite is marked on the upper edge.

    Raises:
        PlotError: no run has a loss.
    """
    known = tables.iterations.dropna(subset=["iteration"])
    known = known[known["loss_known"]]
    if known.empty:
        raise PlotError("no run has a loss: no curves to draw")
    panels = cases(known)
    engines = known[["engine"]].drop_duplicates().to_dict("records")
    looks = Looks(tables.study, engines)
    columns = 1 if len(panels) == 1 else 2
    rows = math.ceil(len(panels) / columns)
    pairs = known[["label", "case"]].drop_duplicates().itertuples(index=False)
    names = dict.fromkeys(short_label(label, case) for label, case in pairs)
    inches = 0.6 + rows * (_PANEL_INCHES + 0.4 * (columns == 1))
    notes = "loss of every iteration, warm-up included", tables.provenance(known["path"])
    with sheet(names, inches, (rows, columns), notes) as (figure, grid, entries):
        for ax, case in itertools.zip_longest(grid.ravel(), panels):
            if case is None:
                ax.remove()
                continue
            inside = known[known["case"] == case]
            entries |= _panel(ax, inside, looks)
            ax.set_title(fold(case, 72 // columns), loc="left")
            watermark(ax, set(inside["source"]))
    return figure


def _panel(ax: Axes, iterations: pd.DataFrame, looks: Looks) -> dict[str, Line2D]:
    """Draw the runs of a case; returns a line for each entry of the legend."""
    entries = {}
    styled = _styled(iterations, looks)
    for order, (label, run, style, variant) in enumerate(styled):
        finite = np.isfinite(run["loss"])
        name, source = short_label(label, run["case"].iloc[0]), run["source"].iloc[0]
        name = name if source == MEASURED else f"{name}, {source}"
        filled = variant == 0 and not SOURCE_STYLES[source].hollow
        # Many lines take turns in their markers, which would hide each other where lines agree.
        step = max(1, len(run) * max(len(styled), 3) // 36)
        (entries[name],) = ax.plot(
            run["iteration"], run["loss"].where(finite), color=style.colour, linestyle=style.dash,
            linewidth=style.width, marker=style.marker, markersize=style.marker_size,
            markevery=(order * step // len(styled) if len(styled) > 3 else 0, step),
            markerfacecolor=style.colour if filled else "none", zorder=3 + order,
            markeredgewidth=1.2,
        )  # fmt: skip
        lost = run.loc[~finite, "iteration"]
        if len(lost):
            (entries[f"{name}: not a number"],) = ax.plot(
                lost, np.full(len(lost), 0.97 - 0.05 * order), linestyle="none", marker="v",
                markersize=4, color=style.colour, transform=ax.get_xaxis_transform(),
            )  # fmt: skip
    ax.set_xlabel("iteration")
    ax.set_ylabel("loss")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.margins(y=0.15)
    return entries


def _styled(iterations: pd.DataFrame, looks: Looks) -> list[tuple[str, pd.DataFrame, Style, int]]:
    """Runs with their styles and places among those of their engine, the widest line first."""
    seen: dict[str, int] = {}
    found = []
    for label, run in iterations.groupby("label", sort=False):
        engine = run["engine"].iloc[0]
        variant = seen.get(engine, 0)
        found.append((label, run, looks.style(engine, variant), variant))
        seen[engine] = variant + 1
    return sorted(found, key=lambda item: -item[2].width)
