"""Observations to what is drawn: panels of series of values, each with its spread and counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from plots.observations import SETTINGS, Observations, varying
from plots.style import EngineStyle, engine_order, engine_title, sweep_style
from plots.tables import MEASURED, SOURCES
from plots.units import Quantity, count

_BATCH = ("accumulation", "global_batch_size")


@dataclass(frozen=True)
class Value:
    """Median of the iterations of all repeats, and their quartiles."""

    x: float
    median: float
    low: float
    """First quartile; with ``high`` the interquartile range."""
    high: float
    mean: float
    iterations: int
    repeats: int
    measured: bool = True


@dataclass(frozen=True)
class Series:
    """What one engine did in one panel."""

    engine: str
    stride: float
    """0 for an engine without, or where it is the panel's x."""
    source: str
    variant: int
    """Place among the strides of the whole figure, so that panels agree in their markers."""
    values: tuple[Value, ...]
    failed: tuple[float, ...] = ()
    """Where runs ended without a time."""

    @property
    def title(self) -> str:
        """Entry of the legend."""
        return engine_title(self.engine, self.stride, self.source)

    @property
    def style(self) -> EngineStyle:
        """How it is drawn."""
        return sweep_style(self.engine, self.variant, self.source)


@dataclass(frozen=True)
class Panel:
    """Runs that differ in engine and in one setting, the x, alone."""

    title: str
    key: tuple[object, ...]
    runs: pd.DataFrame
    values: pd.DataFrame


def split(data: Observations, setting: str) -> list[Panel]:
    """Put observations into panels, one for each combination of the settings but one.

    A sweep keeps either the accumulation or the global batch; the one that leaves fewer panels is
    taken to be kept, and the other follows.
    """
    others = [name for name in SETTINGS if name not in (setting, *_BATCH)]
    kept = [others] if setting in _BATCH else [[*others, name] for name in _BATCH]
    fixed = min(kept, key=lambda names: len(data.runs.drop_duplicates(names)))
    named = varying(data.runs, fixed)
    panels = []
    for key, runs in data.runs.groupby(fixed, sort=False, dropna=False):
        values = data.values[data.values["path"].isin(set(runs["path"]))]
        names = dict.fromkeys(["model", *named])
        panels.append(Panel(setting_title(runs.iloc[0], list(names)), key, runs, values))
    return panels


def setting_title(run: pd.Series, names: Sequence[str]) -> str:
    """Settings in words: ``7B, DP 4, subgroup 100M``; what nobody says is left out."""
    parts = []
    for name in names:
        value = run[name]
        if pd.isna(value) or value == "":
            continue
        text = count(value) if name == "subgroup_numel" else str(value)
        if not isinstance(value, str) and name != "subgroup_numel":
            text = f"{value:g}"
        parts.append(SETTINGS[name] + text)
    return ", ".join(parts)


def variants(frame: pd.DataFrame) -> dict[tuple[str, float], int]:
    """Place of each stride among those of its engine, over the whole figure."""
    found: dict[tuple[str, float], int] = {}
    for engine, rows in frame.groupby("engine", sort=False):
        for place, stride in enumerate(sorted(rows["stride"].unique())):
            found[engine, stride] = place
    return found


def series(
    panel: Panel, x: str, quantity: Quantity, places: dict[tuple[str, float], int]
) -> list[Series]:
    """Series of a panel, in the order of the engines.

    Args:
        panel: Its observations.
        x: Column that is the x; an empty name puts all values at 0. With ``stride`` the strides of
            an engine are one series.
        quantity: What is shown.
        places: From :func:`variants`.
    """
    found = []
    key = ["engine", "source"] if x == "stride" else ["engine", "source", "stride"]
    for (engine, source, *strides), runs in panel.runs.groupby(key, sort=False):
        stride = strides[0] if strides else 0.0
        rows = panel.values[panel.values["path"].isin(set(runs["path"]))]
        values = summarise(rows, x, quantity.column)
        gone = runs[~runs["path"].isin(set(rows["path"]))]
        failed = set(gone[x].dropna()) - {v.x for v in values} if x else set()
        if values or failed:
            place = places.get((engine, stride), 0)
            many = tuple(values), tuple(sorted(failed))
            found.append(Series(engine, stride, source, place, *many))
    return sorted(found, key=_order)


def summarise(rows: pd.DataFrame, x: str, column: str) -> list[Value]:
    """Values of one column, by x; rows that lack either are left out."""
    known = rows[rows[column].notna()]
    at = known[x] if x else pd.Series(0.0, index=known.index)
    found = []
    for where, group in known.groupby(at):
        numbers = group[column]
        low, median, high = (float(numbers.quantile(q)) for q in (0.25, 0.5, 0.75))
        counted = int(group["iterations"].fillna(0).sum())
        repeats = group["path"].nunique()
        mean = float(numbers.mean())
        measured = bool((group["source"] == MEASURED).all())
        found.append(Value(float(where), median, low, high, mean, counted, repeats, measured))
    return found


def titles(cells: Sequence[Sequence[list[Series]]]) -> list[str]:
    """Entries of the legend of all panels, in the order of the engines."""
    every = [one for row in cells for many in row for one in many]
    return list(dict.fromkeys(one.title for one in sorted(every, key=_order)))


def _order(one: Series) -> tuple[int, int, float]:
    return SOURCES.index(one.source), engine_order(one.engine), one.stride


def describe(values: Sequence[Value], what: str = "median", bars: bool = True) -> str:
    """What numbers are, for the footnote: ``median of n=9 iterations; bars: ...``."""
    values = [v for v in values if v.measured]
    if not values:
        return "one value a point, no run of ours behind it"
    text = what
    counts = [v.iterations for v in values if v.iterations]
    if counts:
        text += f" of n={_range(counts)} iterations after the warm-up"
    repeats = [v.repeats for v in values]
    if repeats and max(repeats) > 1:
        text += f" from {_range(repeats)} runs"
    return f"{text}; error bars: interquartile range" if bars and counts else text


def remarks(runs: pd.DataFrame, failed: pd.DataFrame) -> list[str]:
    """What else a reader must know of the runs of a figure: which have no times, which no loss."""
    found = []
    if len(failed):
        reasons = failed["status"].replace("", "no time in the log").value_counts(sort=False)
        listed = ", ".join(f"{reason} {number}" for reason, number in sorted(reasons.items()))
        found.append(f"runs without times: {listed}")
    broken = runs[runs["verdict"].isin(("nan", "frozen"))]
    if len(broken):
        words = ", ".join(sorted(broken["verdict"].unique()))
        found.append(
            f"in {len(broken)} of {len(runs)} runs the loss is not that of training: {words}"
        )
    return found


def _range(numbers: Sequence[int]) -> str:
    return "-".join(str(n) for n in dict.fromkeys((min(numbers), max(numbers))))
