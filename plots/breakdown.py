"""Iteration breakdown: what an iteration's time goes into, engine by engine."""

from __future__ import annotations

import pandas as pd
from matplotlib import style as styles
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from plots.canvas import WIDTH_INCHES, cases, footnote, short_label, title
from plots.style import PHASES, STYLE_FILE
from plots.tables import PlotError, Tables

STEM = "iteration-breakdown"
_BAR_INCHES = 0.36
_NARROWEST_LABEL = 0.075
"""Share of the axis below which a segment has no room for its number."""


def draw(tables: Tables) -> Figure:
    """Stacked bars of forward, backward and update, a panel a case, on one scale.

    Raises:
        PlotError: no run has the time of an iteration.
    """
    timed = tables.runs.dropna(subset=["iteration_ms"])
    if timed.empty:
        raise PlotError("no run has iterations after its warm-up: no breakdown to draw")
    panels = cases(timed)
    rows = [int((timed["case"] == case).sum()) for case in panels]
    with styles.context(STYLE_FILE):
        height = 1.15 + sum(0.4 + _BAR_INCHES * count for count in rows)
        figure = Figure(figsize=(WIDTH_INCHES, height))
        axes = figure.subplots(
            len(panels), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": rows}
        )[:, 0]
        longest = float(timed["iteration_ms"].max())
        for ax, case in zip(axes, panels, strict=True):
            _panel(ax, timed[timed["case"] == case], longest)
            title(ax, case, columns=1)
        axes[-1].set_xlabel("time of an iteration (ms), mean")
        handles = [
            Patch(
                facecolor=s.colour, hatch=s.hatch, edgecolor="black", linewidth=0.5, label=s.title
            )
            for s in PHASES.values()
        ]
        figure.legend(handles=handles, loc="outside upper center", ncols=len(handles))
        footnote(figure, f"{tables.provenance()} · {_counts(timed)}")
    return figure


def _panel(ax: Axes, runs: pd.DataFrame, longest: float) -> None:
    positions = range(len(runs))
    for position, (_, run) in zip(positions, runs.iterrows(), strict=True):
        start = 0.0
        for phase, style in PHASES.items():
            length = _length(run, phase, start)
            if length <= 0:
                continue
            ax.barh(
                position, length, left=start, height=0.68, color=style.colour, hatch=style.hatch,
                edgecolor="black", linewidth=0.5,
            )  # fmt: skip
            if length > _NARROWEST_LABEL * longest and phase != "other":
                box = {"boxstyle": "round,pad=0.15", "facecolor": style.colour, "linewidth": 0}
                ax.text(
                    start + length / 2, position, _short(length), ha="center", va="center",
                    fontsize=7, color=style.text_colour, bbox=box,
                )  # fmt: skip
            start += length
        total = float(run["iteration_ms"])
        ax.text(
            max(start, total) + 0.01 * longest, position, _short(total), va="center",
            fontsize=8, fontweight="bold",
        )  # fmt: skip
    ax.set_yticks(
        list(positions), [short_label(run["label"], run["case"]) for _, run in runs.iterrows()]
    )
    ax.invert_yaxis()
    ax.set_xlim(0, longest * 1.12)
    ax.grid(visible=False, axis="y")


def _length(run: pd.Series, phase: str, start: float) -> float:
    """A segment's length in ms; ``other`` is what of the iteration no phase covers."""
    value = run["iteration_ms"] - start if phase == "other" else run[f"{phase}_ms"]
    return 0.0 if pd.isna(value) else float(value)


def _counts(runs: pd.DataFrame) -> str:
    numbers = sorted({int(n) for n in runs["timed_iterations"]})
    warmups = sorted({int(n) for n in runs["warmup_iterations"]})
    n = "-".join(str(x) for x in dict.fromkeys((numbers[0], numbers[-1])))
    return f"mean of n={n} iterations, without the first {', '.join(map(str, warmups))}"


def _short(milliseconds: float) -> str:
    """Three or four digits, no more than the figure can show."""
    return f"{milliseconds:.0f}" if milliseconds >= 100 else f"{milliseconds:.3g}"
