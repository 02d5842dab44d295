"""Tables to observations: every iteration after the warm-up, with the settings of its run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from plots.tables import Tables

SETTINGS = {
    "model": "",
    "tp": "TP ",
    "dp": "DP ",
    "micro_batch_size": "micro-batch ",
    "accumulation": "accumulation ",
    "global_batch_size": "global batch ",
    "offload_ratio": "offload ratio ",
    "subgroup_numel": "subgroup ",
    "hog_share": "device share taken ",
}
"""What a run was asked for, engine and stride aside, and how a title names it."""
MEASURES = (
    *("iteration_ms", "forward_ms", "backward_ms", "update_ms"),
    *("tflops", "update_rate", "samples_per_s"),
)
_SUMMARIES = {name: f"{name.removesuffix('_ms')}_median_ms" for name in MEASURES[:4]}
_RUN_COLUMNS = (
    *("path", "label", "case", "engine", "stride", "source", "status", "verdict", "point_key"),
    "device",
    *("parameters", *SETTINGS),
)


@dataclass(frozen=True)
class Observations:
    """What figures are made of; times in ms, rates a second."""

    runs: pd.DataFrame
    """A row a run: ``path``, engine, source, status and settings, without gaps in them."""
    values: pd.DataFrame
    """A row an iteration after the warm-up: all of ``runs`` and the measures. A run of which the
    tables hold only a summary has one row, with ``iterations`` (how many it sums up)."""

    @property
    def failed(self) -> pd.DataFrame:
        """Runs without a single time."""
        return self.runs[~self.runs["path"].isin(set(self.values["path"]))]


def observe(tables: Tables) -> Observations:
    """Join both tables."""
    runs = _settled(tables.runs)
    iterations = tables.iterations.merge(
        runs[["path", "warmup_iterations"]], on="path", how="inner", validate="m:1"
    )
    position = iterations.groupby("path").cumcount()
    # An older table does not mark the warm-up, but says how long it is.
    early = (position < iterations["warmup_iterations"]).astype(float)
    left_out = iterations["warmup"].where(iterations["warmup"].notna(), early)
    timed = iterations[(left_out == 0) & iterations["iteration_ms"].notna()]
    own = timed[["path", *(name for name in MEASURES if name in timed)]].assign(iterations=1)
    summed = _summaries(tables.runs[~tables.runs["path"].isin(set(timed["path"]))])
    values = pd.concat([own, summed]) if len(summed) else own
    values = runs.merge(values, on="path", how="inner", validate="1:m")
    for rate, amount, time in (
        ("update_rate", "parameters", "update_ms"),
        ("samples_per_s", "global_batch_size", "iteration_ms"),
    ):
        derived = 1000.0 * values[amount] / values[time].where(values[time] > 0)
        values[rate] = derived.fillna(values[rate]) if rate in values else derived
    return Observations(runs, values)


def varying(frame: pd.DataFrame, names: Sequence[str] = tuple(SETTINGS)) -> list[str]:
    """Those of some settings that are not the same in all rows."""
    return [name for name in names if frame[name].nunique(dropna=False) > 1]


def _settled(runs: pd.DataFrame) -> pd.DataFrame:
    """Runs with every setting that the others allow to work out."""
    table = runs.drop_duplicates("path")[[*_RUN_COLUMNS, "warmup_iterations"]].copy()
    ranked = table["micro_batch_size"] * table["dp"].fillna(1)
    table["accumulation"] = table["accumulation"].fillna(table["global_batch_size"] / ranked)
    # Without a co-process nobody says so.
    table["hog_share"] = table["hog_share"].fillna(0.0)
    table["resident_share"] = (1.0 - table["offload_ratio"]).round(6)
    table["stride"] = table["stride"].fillna(0.0).where(table["engine"] == "hybrid", 0.0)
    return table


def _summaries(runs: pd.DataFrame) -> pd.DataFrame:
    """One row a run that has no iterations of its own, from its medians or else its means."""
    rows = pd.DataFrame({"path": runs["path"], "iterations": runs["timed_iterations"]})
    for name in MEASURES:
        known = runs[name]
        rows[name] = runs[_SUMMARIES[name]].fillna(known) if name in _SUMMARIES else known
    return rows[rows[["iteration_ms", "update_ms", "update_rate"]].notna().any(axis=1)]
