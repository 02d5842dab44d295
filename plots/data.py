"""Tables to observations: every iteration after the warm-up, with the settings of its run."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from configs.fields import field_row
from configs.naming import Fields, Namer
from configs.sources import MEASURED, SOURCES
from configs.study import Study
from plots.style import Look, Looks
from plots.tables import Tables

X = "x"
"""Column of the observations that holds the setting along a figure's axis."""
_NO_SETTINGS = frozenset(("iterations", "seed", "data_prefix"))
"""Fields that no panel is named by; where they set points apart, ``point`` does."""
_BATCH = ("accumulation", "global_batch_size")
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
    """The numbers that figures are made of; times in ms, rates a second."""

    runs: pd.DataFrame
    """A row a run: ``path``, ``point`` (the same in its repeats), engine with its
    :class:`plots.style.Look`, source, status and settings, without gaps in them; with a figure, its
    x."""
    values: pd.DataFrame
    """A row an iteration after the warm-up: all of ``runs`` and the measures. A run of which the
    tables hold only a summary has one row, with ``iterations`` (how many it sums up)."""
    settings: tuple[str, ...]
    """Columns of what a run was asked for, the engine and its own fields aside."""

    def remarks(self, paths: Set[str] | None = None) -> list[str]:
        """Return what else a reader must know: which runs have no times, which no loss.

        Args:
            paths: Runs that the figure shows; by default all.
        """
        found = []
        runs = self.runs if paths is None else self.runs[self.runs["path"].isin(paths)]
        failed = runs[~runs["path"].isin(set(self.values["path"]))]
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


def observe(tables: Tables, y: Sequence[str] = (), x: str = "") -> Observations:
    """Join both tables, with the columns ``y`` and the field ``x`` along a figure's axis."""
    study = tables.study
    settings = tuple(
        name
        for name, row in study.all_fields.items()
        if not row.only_some_engines and name not in (*_NO_SETTINGS, *study.set_by_engines)
    ) + tuple(name for name in tables.runs if name.startswith("model."))
    runs = _settled(tables.runs, settings, study, x)
    phases = [f"{phase}_ms" for phase in study.phases]
    measures = list(dict.fromkeys(("iteration_ms", *phases, "tflops", "update_rate",
                                   "samples_per_s", *y)))  # fmt: skip
    iterations = tables.iterations
    timed = iterations[
        (iterations["warmup"] != 1)
        & iterations["iteration_ms"].notna()
        & iterations["path"].isin(set(runs["path"]))
    ]
    own = timed[["path", *(name for name in measures if name in timed)]].assign(iterations=1)
    # A quantity that iterations do not have counts once for each run.
    once = [name for name in measures if name not in iterations and name in tables.runs]
    of_run = tables.runs.drop_duplicates("path").set_index("path")[once]
    is_first = ~own["path"].duplicated()
    own[once] = of_run.reindex(own["path"]).set_axis(own.index).where(is_first)
    summed = _summaries(tables.runs[~tables.runs["path"].isin(set(timed["path"]))], measures)
    values = pd.concat([own, summed]) if len(summed) else own
    values = runs.merge(values, on="path", validate="1:m").reindex(
        columns=list(dict.fromkeys([*runs, *values, *measures]))
    )
    if phases:  # published phases may come without the whole
        whole = values[phases].sum(axis=1, min_count=len(phases))
        values["iteration_ms"] = values["iteration_ms"].fillna(whole)
    for rate, amount, time in _RATES:
        if time in values:
            derived = 1000.0 * values[amount] / values[time].where(values[time] > 0)
            values[rate] = derived.fillna(values[rate])
    return Observations(runs, values, settings)


def _settled(runs: pd.DataFrame, settings: Sequence[str], study: Study, x: str) -> pd.DataFrame:
    """Return the runs with every setting that the others allow to work out."""
    own = [name for name, row in study.fields.items() if row.only_some_engines and name in runs]
    columns = list(dict.fromkeys((*_RUN_COLUMNS, *settings, *own, *([x] if x in runs else ()))))
    table = runs.drop_duplicates("path")[columns].copy()
    for name in own:  # at its default wherever it does not apply
        default = study.fields[name].default
        unknown = table[name].isna() | (table[name] == "") | ~taken(table, name, study)
        table[name] = table[name].mask(
            unknown, float(default) if isinstance(default, bool) else default
        )
    for companion in study.companions.values():
        # A log of a run without a companion does not name its field.
        table[companion.field] = table[companion.field].fillna(0.0)
    # Along its axis, an engine's own field makes points of one series.
    rows = table.drop(columns=[x], errors="ignore").to_dict("records")
    named = [fields_of(row, study) for row in rows]
    looks = Looks(study, named)
    table["look"] = [looks.of(row) for row in named]
    return table.assign(**{X: _along(table, x, study)}) if x else table


def _along(table: pd.DataFrame, name: str, study: Study) -> pd.Series:
    """Return places on a figure's axis: values, or of a text its place in the texts' order."""
    if name not in table:
        return pd.Series(float("nan"), index=table.index)
    values = table[name]
    if not pd.api.types.is_numeric_dtype(values):
        places = {text: float(place) for place, text in enumerate(sorted({*values} - {""}))}
        values = values.map(places).astype(float)
    if field_row(study.all_fields, name).zero:
        values = values.mask(table[name] == 0)
    # Engines that do not take the field stand beside the axis, not on it.
    return values.where(taken(table, name, study), 0.0)


def _summaries(runs: pd.DataFrame, measures: Sequence[str]) -> pd.DataFrame:
    """Return a row a run that has no iterations of its own, of its medians or else its means."""
    rows = pd.DataFrame({"path": runs["path"], "iterations": runs["timed_iterations"]})
    for name in (name for name in measures if name in runs):
        median = f"{name.removesuffix('_ms')}_median_ms"
        rows[name] = runs[median].fillna(runs[name]) if median in runs else runs[name]
    return rows[rows.drop(columns=["path", "iterations"]).notna().any(axis=1)]


def taken(table: pd.DataFrame, field: str, study: Study) -> pd.Series:
    """Return which rows are of an engine that a field has a meaning for."""
    if not field_row(study.all_fields, field).only_some_engines:
        return pd.Series(data=True, index=table.index)
    return table["engine"].isin(
        [name for name, row in study.engines.items() if field in row.fields]
    )


def varying(frame: pd.DataFrame, names: Sequence[str]) -> list[str]:
    """Return those of some settings that are not the same in all rows."""
    return [name for name in names if frame[name].nunique(dropna=False) > 1]


def fields_of(row: pd.Series | dict[str, Any], study: Study) -> Fields:
    """Return what a row of a table knows of its fields, with their types, as the namer takes it."""
    rows, found = study.all_fields, {}
    for name, value in row.items():
        known = name in rows or name == "engine" or str(name).startswith("model.")
        if known and value != "" and not pd.isna(value):
            plain = value.item() if isinstance(value, np.generic) else value
            found[name] = bool(plain) if name in rows and rows[name].type == "bool" else plain
    return found


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


def pooled(rows: pd.DataFrame, column: str, x: float = 0.0) -> Value | None:
    """Return the value of one column over all rows that have it; None where none has."""
    known = rows[rows[column].notna()]
    if known.empty:
        return None
    low, median, high = known[column].quantile([0.25, 0.5, 0.75])
    iterations, repeats = int(known["iterations"].fillna(0).sum()), known["path"].nunique()
    measured = bool((known["source"] == MEASURED).all())
    return Value(x, median, low, high, iterations, repeats, measured)


def along(rows: pd.DataFrame, column: str, x: str) -> list[Value]:
    """Return the values of one column, one a point and x."""
    found = [pooled(group, column, float(at)) for (at, _), group in rows.groupby([x, "point"])]
    return [value for value in found if value]


@dataclass(frozen=True)
class Setting:
    """Runs of one engine at one setting, seeds and repeats together."""

    look: Look
    source: str
    words: tuple[str, ...]
    """Settings that are not the same in all runs."""
    rows: pd.DataFrame


def by_setting(data: Observations, study: Study) -> list[Setting]:
    """Return the observations by engine, then setting."""
    named = [name for name in varying(data.runs, data.settings) if name != "global_batch_size"]
    namer, found = Namer(study), []
    for (look, source, *_), rows in data.values.groupby(["look", "source", *named], dropna=False):
        fields = fields_of(rows.iloc[0], study)
        words = tuple(namer.setting(name, fields[name]) for name in named if name in fields)
        found.append(Setting(look, source, words, rows))
    return sorted(found, key=lambda one: (one.look, SOURCES.index(one.source)))


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
    named = [name for name in varying(data.runs, fixed) if name != "model"]
    namer, panels = Namer(study), []
    for _, runs in data.runs.groupby(fixed, sort=False, dropna=False):
        values = data.values[data.values["path"].isin(set(runs["path"]))]
        title = namer.case(fields_of(runs.iloc[0], study), named)
        panels.append(Panel(title, runs, values))
    return panels


@dataclass(frozen=True)
class Series:
    """The values of one engine in one panel."""

    look: Look
    """Its engine; a field of its own that is the panel's x is not part of it."""
    source: str
    values: tuple[Value, ...]
    failed: tuple[float, ...] = ()
    """Values of x at which runs ended without a time."""

    @property
    def title(self) -> str:
        """Return the entry of the legend."""
        return self.look.title(self.source)


def series(panel: Panel, column: str) -> list[Series]:
    """Return the series of one column of a panel over its x, by source and engine."""
    found = []
    for (look, source), runs in panel.runs.groupby(["look", "source"], sort=False):
        rows = panel.values[panel.values["path"].isin(set(runs["path"]))]
        values = along(rows, column, X)
        gone = set(runs.loc[~runs["path"].isin(set(rows["path"])), X].dropna())
        failed = gone - {value.x for value in values}
        if values or failed:
            found.append(Series(look, source, tuple(values), tuple(sorted(failed))))
    return sorted(found, key=lambda one: (SOURCES.index(one.source), one.look))


def describe(values: Sequence[Value]) -> str:
    """Say what numbers are, for the footnote: ``median of n=9 iterations; error bars: ...``."""
    values = [value for value in values if value.measured]
    if not values:
        return "one value a point, no run of ours behind it"
    repeats = span([value.repeats for value in values])
    counts = [value.iterations for value in values if value.iterations]
    if not counts:
        return "median"
    text = f"median of n={span(counts)} iterations after the warm-up"
    if all(value.iterations == value.repeats for value in values):
        text = f"median of n={repeats} runs"
    elif repeats != "1":
        text += f" from {repeats} runs"
    return f"{text}; error bars: interquartile range"


def span(numbers: Sequence[int]) -> str:
    """Return the least and the most of some counts, as one where they are equal."""
    return "-".join(str(n) for n in dict.fromkeys((min(numbers), max(numbers))))
