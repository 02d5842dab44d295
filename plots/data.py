"""Tables to observations: every iteration after the warm-up, with the settings of its run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from configs.fields import field_row
from configs.naming import Fields, Namer
from configs.study import Figure, Study
from plots.style import Look, Looks
from plots.tables import MEASURED, SOURCES, Tables

X = "x"
"""Column of the observations that holds the setting along a figure's axis."""
_NO_SETTINGS = frozenset(("iterations", "seed", "data_prefix"))
"""Fields that no panel is named by; where they set points apart, ``point`` does."""
_RUN_COLUMNS = (
    *("path", "label", "case", "engine", "source", "status", "verdict", "point", "device"),
    *("parameters", "warmup_iterations"),
)
_RATES = (
    ("update_rate", "parameters", "update_ms"),
    ("samples_per_s", "global_batch_size", "iteration_ms"),
)
"""Rate, and what it is of by which time."""


@dataclass(frozen=True)
class Observations:
    """What figures are made of; times in ms, rates a second."""

    runs: pd.DataFrame
    """A row a run: ``path``, ``point`` (the same in its repeats), engine with its
    :class:`plots.style.Look`, source, status and settings, without gaps in them; with a figure, its
    x."""
    values: pd.DataFrame
    """A row an iteration after the warm-up: all of ``runs`` and the measures. A run of which the
    tables hold only a summary has one row, with ``iterations`` (how many it sums up)."""
    settings: tuple[str, ...]
    """Columns of what a run was asked for, the engine and its own fields aside."""

    @property
    def failed(self) -> pd.DataFrame:
        """Runs without a single time."""
        return self.runs[~self.runs["path"].isin(set(self.values["path"]))]


def observe(tables: Tables, figure: Figure | None = None) -> Observations:
    """Join both tables, for the x and the columns of a figure where one is given."""
    study = tables.study
    settings = tuple(
        name
        for name, row in study.all_fields.items()
        if not row.only_some_engines and name not in (*_NO_SETTINGS, *study.set_by_engines)
    ) + tuple(name for name in tables.runs if name.startswith("model."))
    runs = _settled(tables.runs, settings, study, figure)
    times = ["iteration_ms", *(f"{phase}_ms" for phase in study.phases)]
    y = figure.y if figure else ()
    measures = list(dict.fromkeys((*times, "tflops", *(rate for rate, _, _ in _RATES), *y)))
    timed = tables.iterations[
        (tables.iterations["warmup"] != 1)
        & tables.iterations["iteration_ms"].notna()
        & tables.iterations["path"].isin(set(runs["path"]))
    ]
    own = timed[["path", *(name for name in measures if name in timed)]].assign(iterations=1)
    # A quantity that iterations do not have counts once for each run.
    once = [name for name in measures if name not in tables.iterations and name in tables.runs]
    first = ~own["path"].duplicated()
    of_run = tables.runs.drop_duplicates("path").set_index("path")[once]
    own[once] = of_run.reindex(own["path"]).set_axis(own.index).where(first)
    summed = _summaries(tables.runs[~tables.runs["path"].isin(set(timed["path"]))], measures)
    values = pd.concat([own, summed]) if len(summed) else own
    values = runs.merge(values, on="path", how="inner", validate="1:m")
    for rate, amount, time in _RATES:
        if time in values:
            derived = 1000.0 * values[amount] / values[time].where(values[time] > 0)
            values[rate] = derived.fillna(values[rate])
    return Observations(runs, values, settings)


def varying(frame: pd.DataFrame, names: Sequence[str]) -> list[str]:
    """Those of some settings that are not the same in all rows."""
    return [name for name in names if frame[name].nunique(dropna=False) > 1]


def fields_of(row: pd.Series | dict[str, Any], study: Study) -> Fields:
    """A row of a table as the namer takes it: what is known of its fields, with their types."""
    rows, found = study.all_fields, {}
    for name, value in row.items():
        known = name in rows or name == "engine" or str(name).startswith("model.")
        if known and value != "" and not pd.isna(value):
            plain = value.item() if isinstance(value, np.generic) else value
            found[name] = bool(plain) if name in rows and rows[name].type == "bool" else plain
    return found


def _own_fields(table: pd.DataFrame, study: Study) -> pd.DataFrame:
    """Runs with engines' own fields at their default wherever they do not apply."""
    own = {}
    for name, row in study.fields.items():
        if row.only_some_engines and name in table:
            unknown = table[name].isna() | (table[name] == "") | ~taken(table, name, study)
            default = float(row.default) if isinstance(row.default, bool) else row.default
            own[name] = table[name].mask(unknown, default)
    return table.assign(**own)


def taken(table: pd.DataFrame, field: str, study: Study) -> pd.Series:
    """Which rows are of an engine that a field has a meaning for."""
    if not field_row(study.all_fields, field).only_some_engines:
        return pd.Series(data=True, index=table.index)
    return table["engine"].isin(
        [name for name, row in study.engines.items() if field in row.fields]
    )


def _settled(
    runs: pd.DataFrame, settings: Sequence[str], study: Study, figure: Figure | None
) -> pd.DataFrame:
    """Runs with every setting that the others allow to work out."""
    own = [name for name, row in study.fields.items() if row.only_some_engines]
    x = [figure.x] if figure and figure.x else []
    columns = list(dict.fromkeys((*_RUN_COLUMNS, *settings, *own, *(n for n in x if n in runs))))
    table = _own_fields(runs.drop_duplicates("path")[columns], study)
    ranked = table["micro_batch_size"] * table["dp"].fillna(1)
    table["accumulation"] = table["accumulation"].fillna(table["global_batch_size"] / ranked)
    for companion in study.companions.values():
        # A log of a run without a companion does not name its field.
        table[companion.field] = table[companion.field].fillna(0.0)
    # Along its axis, an engine's own field makes points of one series.
    named = [
        fields_of(row, study) for row in table.drop(columns=x, errors="ignore").to_dict("records")
    ]
    looks = Looks(study, named)
    table["look"] = [looks.of(row) for row in named]
    return table if not (figure and x) else table.assign(**{X: _along(table, figure, study)})


def _along(table: pd.DataFrame, figure: Figure, study: Study) -> pd.Series:
    """Places on a figure's axis: values, or for text its place in the order of the texts."""
    if figure.x not in table:
        return pd.Series(float("nan"), index=table.index)
    values = table[figure.x]
    if not pd.api.types.is_numeric_dtype(values):
        texts = sorted({text for text in values if text})
        places = {text: float(place) for place, text in enumerate(texts)}
        values = values.map(places).astype(float)
    if field_row(study.all_fields, figure.x).zero:
        values = values.mask(table[figure.x] == 0)
    # Engines that do not take the field stand beside the axis, not on it.
    return values.where(taken(table, figure.x, study), 0.0)


def _summaries(runs: pd.DataFrame, measures: Sequence[str]) -> pd.DataFrame:
    """One row a run that has no iterations of its own, from its medians or else its means."""
    rows = pd.DataFrame({"path": runs["path"], "iterations": runs["timed_iterations"]})
    for name in (name for name in measures if name in runs):
        median = f"{name.removesuffix('_ms')}_median_ms"
        rows[name] = runs[median].fillna(runs[name]) if median in runs else runs[name]
    return rows[rows.drop(columns=["path", "iterations"]).notna().any(axis=1)]


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
