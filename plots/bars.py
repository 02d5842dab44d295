"""Groups of vertical bars: a group a model or a setting, a bar an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from configs.study import Phase, Study, Style
from plots.canvas import fold
from plots.observations import Observations, varying
from plots.series import setting_title, summarise
from plots.style import REST, SOURCE_STYLES, Look, phase_styles
from plots.tables import SOURCES
from plots.units import Quantity, Scale, short

MOST_BARS = 30
"""In a row, so that a bar stays as wide as its tag."""
_WIDTH = 0.9
_GAP = 0.8
_ROW_CHARACTERS = {8.0: 100, 6.0: 130}
"""Room below a row, by size of the font."""


@dataclass(frozen=True)
class Bar:
    """One engine under one set of settings."""

    group: str
    look: Look
    source: str
    rows: pd.DataFrame
    """Its observations."""

    @property
    def title(self) -> str:
        """Entry of the legend, led by the tag below the bar."""
        return f"{self.look.tag}: {self.look.title(self.source)}"


def bars_of(data: Observations, study: Study) -> list[list[Bar]]:
    """Groups of bars: models by their size, the settings of a model as they come."""
    values = data.values
    if values.empty:
        return []
    shown = data.runs[data.runs["path"].isin(set(values["path"]))]
    names = varying(shown, data.settings)
    if {"accumulation", "global_batch_size"} <= set(names):
        names.remove("global_batch_size")
    groups = []
    sizes = shown.groupby("model", sort=False)["parameters"].max()
    for _, rows in values.groupby(list(data.settings), sort=False, dropna=False):
        first = rows.iloc[0]
        title = setting_title(first, names, study)
        bars = [
            Bar(title, look, source, own)
            for (look, source), own in rows.groupby(["look", "source"], sort=False)
        ]
        bars.sort(key=lambda bar: (bar.look, SOURCES.index(bar.source)))
        size = sizes.get(first["model"], float("nan"))
        groups.append((float("inf") if pd.isna(size) else size, bars))
    return [bars for _, bars in sorted(groups, key=lambda item: item[0])]


def in_rows(groups: Sequence[list[Bar]]) -> list[list[list[Bar]]]:
    """Deal groups into rows of about as many bars each."""
    total = sum(map(slots, groups))
    per_row = total / max(1, -(-total // MOST_BARS))
    rows: list[list[list[Bar]]] = [[]]
    for group in groups:
        if rows[-1] and sum(map(slots, rows[-1])) + slots(group) / 2 > per_row:
            rows.append([])
        rows[-1].append(group)
    return rows


def positions(groups: Sequence[list[Bar]]) -> list[list[float]]:
    """Centres of the bars of a row; a gap of a bar lies between groups."""
    at, found = 0.0, []
    for group in groups:
        spare = (slots(group) - len(group)) / 2
        found.append([at + spare + i for i in range(len(group))])
        at += slots(group) + _GAP
    return found


def slots(group: list[Bar]) -> int:
    """Room of a group in bars: that of three engines at least, for the sake of its name."""
    return max(len(group), 3)


def _placed(groups: Sequence[list[Bar]]) -> list[tuple[Bar, float]]:
    """Bars of a row with their centres."""
    at = [place for places in positions(groups) for place in places]
    return list(zip((bar for group in groups for bar in group), at, strict=True))


def draw_bars(
    ax: Axes, groups: Sequence[list[Bar]], quantity: Quantity, scale: Scale, factor: float = 0.0
) -> None:
    """Draw medians with quartiles; with a ``factor`` its product with the mean instead.

    Args:
        ax: Where.
        groups: Bars of this row.
        quantity: What.
        scale: Its unit.
        factor: 100 for the time of 100 iterations.
    """
    for bar, at in _placed(groups):
        for value in summarise(bar.rows, "", quantity.column):
            height = (factor * value.mean if factor else value.median) / scale.divisor
            low, high = value.low / scale.divisor, value.high / scale.divisor
            ax.bar(at, height, _WIDTH, **face(bar.look.alone, bar.source))
            if high > low and not factor:
                ax.errorbar(
                    at, height, yerr=([height - low], [high - height]), color="black",
                    capsize=1.5, elinewidth=0.8, capthick=0.8,
                )  # fmt: skip
            _above(ax, at, height if factor else high, height, groups)


def draw_stacks(ax: Axes, groups: Sequence[list[Bar]], scale: Scale, study: Study) -> None:
    """Draw the mean of each phase on top of the one before, up to the whole iteration."""
    styles = phase_styles(study)
    for bar, at in _placed(groups):
        height = 0.0
        if not has_iteration(bar.rows, study).any():
            continue
        for phase, length in phases(bar.rows, study).items():
            colours = phase_face(styles[phase], bar.source)
            ax.bar(at, length / scale.divisor, _WIDTH, bottom=height, **colours)
            height += length / scale.divisor
        _above(ax, at, height, height, groups)


def has_iteration(rows: pd.DataFrame, study: Study) -> pd.Series:
    """Which observations have the time of an iteration, or of all that it is made of."""
    parts = rows[[f"{phase}_ms" for phase in study.phases]]
    return rows["iteration_ms"].notna() | (parts.notna().all(axis=1) & bool(study.phases))


def phases(rows: pd.DataFrame, study: Study) -> dict[str, float]:
    """Mean ms of each known phase, and of what of the iteration no phase covers."""
    means = {phase: rows[f"{phase}_ms"].mean() for phase in study.phases}
    found = {phase: float(mean) for phase, mean in means.items() if mean > 0}
    rest = rows["iteration_ms"].mean() - sum(found.values())
    return found | ({REST: float(rest)} if rest > 0 else {})


def face(style: Style, source: str) -> dict[str, Any]:
    """Fill, hatch and edge of an engine's bar; published values are hollow."""
    return _face(style.colour, style.hatch, source, style.colour)


def phase_face(style: Phase, source: str) -> dict[str, Any]:
    """Fill, hatch and edge of a phase's segment; published values are hollow."""
    white = style.colour.lower() in ("#ffffff", "white")
    return _face(style.colour, style.hatch, source, "0.4" if white else style.colour)


def _face(colour: str, hatch: str, source: str, outline: str) -> dict[str, Any]:
    if SOURCE_STYLES[source].hollow:
        return {"facecolor": "white", "hatch": hatch, "edgecolor": outline, "linewidth": 1.3}
    fill = colour, SOURCE_STYLES[source].alpha
    return {"facecolor": fill, "hatch": hatch, "edgecolor": "black", "linewidth": 0.5}


def _above(ax: Axes, at: float, top: float, value: float, groups: Sequence[list[Bar]]) -> None:
    """Write a bar's value over it, upright where bars are narrow."""
    narrow = sum(map(slots, groups)) > 12
    ax.annotate(
        short(value), (at, top), xytext=(0, 3), textcoords="offset points", ha="center",
        va="bottom", fontsize=6.5, rotation=90 if narrow else 0, annotation_clip=False,
    )  # fmt: skip


def name_bars(ax: Axes, groups: Sequence[list[Bar]], last: bool) -> None:
    """Tag every bar, and name the groups below the last axes of a column."""
    placed = _placed(groups)
    ax.set_xticks([at for _, at in placed], [bar.look.tag for bar, _ in placed], fontsize=6.5)
    ax.tick_params(axis="x", length=0, pad=2)
    width = sum(slots(group) + _GAP for group in groups)
    ax.set_xlim(-0.5 - _GAP / 2, width - 0.5 - _GAP / 2)
    ax.grid(visible=False, axis="x")
    for row, group in zip(positions(groups), groups if last else (), strict=False):
        size = 6.0 if "," in group[0].group else 8.0
        room = int(_ROW_CHARACTERS[size] * (slots(group) + _GAP) / width)
        ax.annotate(
            fold(group[0].group, max(6, room)), ((row[0] + row[-1]) / 2, 0),
            xycoords=ax.get_xaxis_transform(), xytext=(0, -15), textcoords="offset points",
            ha="center", va="top", fontsize=size,
        )  # fmt: skip


def engine_handles(bars: Sequence[Bar]) -> dict[str, Patch]:
    """Legend of engines, in the order of the figures."""
    ordered = sorted(bars, key=lambda bar: (SOURCES.index(bar.source), bar.look))
    return {bar.title: Patch(**face(bar.look.alone, bar.source)) for bar in ordered}


def phase_handles(found: set[str], study: Study) -> dict[str, Patch]:
    """Legend of phases, in the order they run."""
    return {
        style.title: Patch(**phase_face(style, "measured"))
        for phase, style in phase_styles(study).items()
        if phase in found
    }
