"""Reads the tables that ``python -m parse`` writes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pandas as pd

MEASURED, SIMULATED, PUBLISHED = SOURCES = ("measured", "simulated", "published")
"""Where a number comes from: column ``source``, which is ``measured`` where a table lacks it."""

_RUNS_NEED = (
    *("path", "label", "case", "engine", "device", "hardware"),
    *("iteration_ms", "forward_ms", "backward_ms", "update_ms"),
    *("warmup_iterations", "timed_iterations"),
)
_ITERATIONS_NEED = ("path", "label", "case", "engine", "iteration", "loss")
_PHASE_MEDIANS = tuple(f"{name}_median_ms" for name in ("iteration", "forward", "backward"))
_OPTIONAL = {
    "runs": (
        *("model", "status", "verdict", "source", "point_key", "tp", "dp", "global_batch_size"),
        *("micro_batch_size", "accumulation", "offload_ratio", "subgroup_numel", "hog_share"),
        *("stride", "parameters", "tflops", "update_rate", "samples_per_s", "repeat"),
        *(*_PHASE_MEDIANS, "update_median_ms"),
    ),
    "iterations": (
        *("stride", "warmup", "iteration_ms", "forward_ms", "backward_ms", "update_ms", "tflops"),
        *("source",),
    ),
}
"""Columns that tables of an older parser, or of another program, may lack: empty there."""
_MEMORY_NEED = ("path", "label", "case", "engine", "title")
_MONITOR_NEED = ("path", "label", "case", "engine", "time_s")
_COMPARISONS_NEED = ("case", "engine", "phase", "ratio", "ratio_low", "ratio_high", "speedup")
_TEXT = frozenset(
    (
        *("path", "label", "reference_label", "case", "engine", "model", "status", "point_key"),
        *("device", "hardware", "source", "verdict", "verdict_detail", "loss_first", "loss_last"),
        *("title", "phase", "equality", "speedup", "withheld", "paired"),
    )
)


class PlotError(ValueError):
    """A figure cannot be drawn; the message says what is missing."""


@dataclass(frozen=True)
class Tables:
    """All tables of a set of runs."""

    runs: pd.DataFrame
    iterations: pd.DataFrame
    """With a column ``loss_known``: whether there is a loss, be it NaN."""
    folder: Path

    @cached_property
    def memory(self) -> pd.DataFrame:
        """``memory.csv``: a row a line of DeepSpeed's ``memory_breakdown``.

        Raises:
            PlotError: there is no such table, or it has no rows.
        """
        return _read(self.folder / "memory.csv", _MEMORY_NEED)

    @cached_property
    def monitor(self) -> pd.DataFrame:
        """``monitor.csv``: a row a sample and device; see :attr:`memory`."""
        return _read(self.folder / "monitor.csv", _MONITOR_NEED)

    @cached_property
    def comparisons(self) -> pd.DataFrame:
        """``comparisons.csv``: a row a pair of engines and a phase; see :attr:`memory`."""
        return _read(self.folder / "comparisons.csv", _COMPARISONS_NEED)

    def provenance(self, paths: Iterable[str] | None = None) -> str:
        """What every figure carries: that it was measured, and on what.

        Args:
            paths: Runs that the figure shows; all of them without it.
        """
        runs = self.runs if paths is None else self.runs[self.runs["path"].isin(set(paths))]
        parts = []
        for source in SOURCES:
            rows = runs[runs["source"] == source]
            if rows.empty:
                continue
            described = (rows["device"] + " " + rows["hardware"]).str.strip()
            devices = "; ".join(name for name in described.unique() if name)
            if source == MEASURED:
                devices = devices or "device not stated in the log"
            parts += [f"{source} · {devices}" if devices else source]
        return " · ".join(parts)


def read_tables(folder: Path) -> Tables:
    """Read ``runs.csv`` and ``iterations.csv``; the others are read when a figure asks for them.

    Raises:
        PlotError: a table is missing, is not one of ours, or has no rows.
    """
    runs = _filled(_read(folder / "runs.csv", _RUNS_NEED), _OPTIONAL["runs"])
    table = _read(folder / "iterations.csv", _ITERATIONS_NEED, may_be_empty=True)
    iterations = _filled(table, _OPTIONAL["iterations"])
    known = set(SOURCES)
    for name, table in (("runs.csv", runs), ("iterations.csv", iterations)):
        table["source"] = table["source"].replace("", MEASURED)
        strange = set(table["source"]) - known
        if strange:
            raise PlotError(
                f"{folder / name}: source '{min(strange)}' is none of {', '.join(SOURCES)}"
            )
    return Tables(runs, iterations, folder)


def _read(path: Path, needed: tuple[str, ...], *, may_be_empty: bool = False) -> pd.DataFrame:
    try:
        # As text first: a loss of "nan" was measured, an empty cell was not.
        table = pd.read_csv(path, dtype=str, keep_default_na=False)
    except FileNotFoundError:
        raise PlotError(f"{path}: no such table; make it with python -m parse") from None
    except (OSError, ValueError) as error:
        raise PlotError(f"{path}: cannot be read: {str(error).splitlines()[0]}") from None
    missing = [column for column in needed if column not in table]
    if missing:
        raise PlotError(f"{path}: column '{missing[0]}' is missing; make it with python -m parse")
    if table.empty and not may_be_empty:
        raise PlotError(f"{path}: has no rows")
    if "loss" in needed:
        table["loss_known"] = table["loss"] != ""
    for column in set(table.columns) - _TEXT - {"loss_known"}:
        table[column] = pd.to_numeric(table[column], errors="coerce")
    return table


def _filled(table: pd.DataFrame, columns: tuple[str, ...]) -> pd.DataFrame:
    absent = {
        column: "" if column in _TEXT else float("nan") for column in columns if column not in table
    }
    return table.assign(**absent)
