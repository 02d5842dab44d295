"""Reads the tables that ``python -m parse`` writes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pandas as pd

_RUNS_NEED = (
    *("path", "label", "case", "engine", "device", "hardware"),
    *("iteration_ms", "forward_ms", "backward_ms", "update_ms"),
    *("warmup_iterations", "timed_iterations"),
)
_ITERATIONS_NEED = ("path", "label", "case", "engine", "iteration", "loss")
_TEXT = ("path", "label", "case", "engine", "device", "hardware")


class PlotError(ValueError):
    """A figure cannot be drawn; the message says what is missing."""


@dataclass(frozen=True)
class Tables:
    """Both tables of a set of runs."""

    runs: pd.DataFrame
    iterations: pd.DataFrame
    """With a column ``loss_known``: whether there is a loss, be it NaN."""

    def provenance(self) -> str:
        """What every figure carries: that it was measured, and on what."""
        described = (self.runs["device"] + " " + self.runs["hardware"]).str.strip()
        devices = [name for name in described.unique() if name]
        return "measured · " + ("; ".join(devices) or "device not stated in the log")


def read_tables(folder: Path) -> Tables:
    """Read ``runs.csv`` and ``iterations.csv``.

    Raises:
        PlotError: a table is missing, is not one of ours, or has no rows.
    """
    return Tables(
        _read(folder / "runs.csv", _RUNS_NEED), _read(folder / "iterations.csv", _ITERATIONS_NEED)
    )


def _read(path: Path, needed: tuple[str, ...]) -> pd.DataFrame:
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
    if table.empty:
        raise PlotError(f"{path}: has no rows")
    if "loss" in needed:
        table["loss_known"] = table["loss"] != ""
    for column in set(needed) - set(_TEXT):
        table[column] = pd.to_numeric(table[column], errors="coerce")
    return table
