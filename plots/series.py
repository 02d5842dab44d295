"""Observations to what is drawn: panels of series of values, each with its spread and counts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pandas as pd

from configs.naming import Namer
from configs.study import Study
from plots.observations import Observations, X, fields_of, varying
from plots.style import Look
from plots.tables import MEASURED, SOURCES

_BATCH = ("accumulation", "global_batch_size")


@dataclass(frozen=True)
class Value:
    """Median of the iterations of all repeats of a point, and their quartiles."""

    x: float
    median: float
    low: float
    """First quartile; with ``high`` the interquartile range."""
    high: float
    iterations: int
    repeats: int
    measured: bool = True


@dataclass(frozen=True)
class Series:
    """What one engine did in one panel."""

    look: Look
    """Its engine; a field of its own that is the panel's x is not part of it."""
    source: str
    values: tuple[Value, ...]
    failed: tuple[float, ...] = ()
    """Where runs ended without a time."""

    @property
    def title(self) -> str:
        """Entry of the legend."""
        return self.look.title(self.source)


@dataclass(frozen=True)
class Panel:
    """Runs that differ in engine and in one setting, the x, alone."""

    title: str
    runs: pd.DataFrame
    values: pd.DataFrame


def split(data: Observations, setting: str, study: Study) -> list[Panel]:
    """Put observations into panels, one for each combination of the settings but one.

    A sweep keeps either the accumulation or the global batch; the one that leaves fewer panels is
    taken to be kept, and the other follows.
    """
    others = [name for name in data.settings if name not in (setting, *_BATCH)]
    kept = [others] if setting in _BATCH else [[*others, name] for name in _BATCH]
    fixed = min(kept, key=lambda names: len(data.runs.drop_duplicates(names)))
    named = varying(data.runs, fixed)
    panels = []
    for _, runs in data.runs.groupby(fixed, sort=False, dropna=False):
        values = data.values[data.values["path"].isin(set(runs["path"]))]
        panels.append(Panel(setting_title(runs.iloc[0], named, study), runs, values))
    return panels


def setting_title(run: pd.Series, names: Sequence[str], study: Study) -> str:
    """Model and settings in words: ``7B, DP 4, micro-batch 2``; unknown ones are left out."""
    named = [name for name in names if name != "model"]
    return Namer(study).case(fields_of(run, study), named)


def series(panel: Panel, column: str) -> list[Series]:
    """Series of one column of a panel over its x, in the order of the engines."""
    found = []
    for (look, source), runs in panel.runs.groupby(["look", "source"], sort=False):
        rows = panel.values[panel.values["path"].isin(set(runs["path"]))]
        values = summarise(rows, column, X)
        gone = runs[~runs["path"].isin(set(rows["path"]))]
        failed = set(gone[X].dropna()) - {v.x for v in values}
        if values or failed:
            found.append(Series(look, source, tuple(values), tuple(sorted(failed))))
    return in_order(found)


def summarise(rows: pd.DataFrame, column: str, x: str = "") -> list[Value]:
    """Values of one column, one a point and x; rows that lack either are left out."""
    known = rows[rows[column].notna()].assign(**({} if x else {X: 0.0}))
    found = []
    for (at, _), group in known.groupby([x or X, "point"]):
        low, median, high = group[column].quantile([0.25, 0.5, 0.75])
        counts = int(group["iterations"].fillna(0).sum()), group["path"].nunique()
        measured = bool((group["source"] == MEASURED).all())
        found.append(Value(float(at), median, low, high, *counts, measured))
    return found


def in_order(many: Iterable[Series]) -> list[Series]:
    """Series in the order of sources and engines."""
    return sorted(many, key=lambda one: (SOURCES.index(one.source), one.look))


def describe(values: Sequence[Value], spread: bool = True) -> str:
    """What numbers are, for the footnote: ``median of n=9 iterations; bars: ...``."""
    values = [v for v in values if v.measured]
    if not values:
        return "one value a point, no run of ours behind it"
    text = "median"
    counts = [v.iterations for v in values if v.iterations]
    if counts:
        text += f" of n={span(counts)} iterations after the warm-up"
    if max(repeats := [v.repeats for v in values]) > 1:
        text += f" from {span(repeats)} runs"
    return f"{text}; error bars: interquartile range" if spread and counts else text


def remarks(runs: pd.DataFrame, failed: pd.DataFrame) -> list[str]:
    """What else a reader must know of the runs of a figure: which have no times, which no loss."""
    found = []
    if len(failed):
        reasons = failed["status"].replace("", "no time in the log").value_counts(sort=False)
        listed = ", ".join(f"{reason} {number}" for reason, number in sorted(reasons.items()))
        found.append(f"runs without times: {listed}")
    broken = runs[~runs["verdict"].isin(("", "trains"))]
    if len(broken):
        words = ", ".join(sorted(broken["verdict"].unique()))
        found.append(
            f"in {len(broken)} of {len(runs)} runs the loss is not that of training: {words}"
        )
    return found


def span(numbers: Sequence[int]) -> str:
    """The least and the most of some counts, as one where they are equal."""
    return "-".join(str(n) for n in dict.fromkeys((min(numbers), max(numbers))))
