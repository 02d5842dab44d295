"""Reads the tables that ``python -m parse`` writes, and the study that they are of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pandas as pd

from configs.errors import ConfigError
from configs.fields import shaped_links
from configs.sources import MEASURED, SOURCES
from configs.study import Study
from plots.current import RUNS_FILE, study_of

KEYS = ("path", "label", "case", "engine")
"""Columns of every table: the run that a row is of."""
_RUNS_NEED = (*KEYS, "device", "hardware", "iteration_ms", "warmup_iterations", "timed_iterations")
_OPTIONAL = (
    *("status", "verdict", "source", "point", "parameters", "warmup", "iteration"),
    *("iteration_ms", "iteration_median_ms", "tflops", "update_rate", "samples_per_s", "busy"),
)
"""Columns that tables of another program may lack: empty there."""
_TEXT = frozenset(
    (
        *(*KEYS, "reference_label", "status", "point", "point_key", "device", "hardware"),
        *("verdict", "verdict_detail", "loss_first", "loss_last", "title", "source", "run_id"),
        *("started", "older", "busy"),
    )
)


class PlotError(ConfigError):
    """A figure cannot be drawn; the message says what is missing."""

    def __str__(self) -> str:
        return " ".join(super().__str__().split())


@dataclass(frozen=True)
class Tables:
    """All tables of a set of runs, and their study."""

    runs: pd.DataFrame
    iterations: pd.DataFrame
    """With a column ``loss_known``: whether there is a loss, be it NaN."""
    folder: Path
    study: Study

    @cached_property
    def memory(self) -> pd.DataFrame:
        """``memory.csv``: a row a line of DeepSpeed's ``memory_breakdown``.

        Raises:
            PlotError: there is no such table, or it has no rows.
        """
        return self._read("memory.csv", (*KEYS, "title", "iteration"))

    @cached_property
    def monitor(self) -> pd.DataFrame:
        """``monitor.csv``: a row a sample and device; see :attr:`memory`."""
        return self._read("monitor.csv", (*KEYS, "time_s"))

    def _read(self, name: str, needed: Sequence[str]) -> pd.DataFrame:
        table = _read(self.folder / name, self.study, needed)
        if table.empty:
            raise PlotError(f"{self.folder / name}: has no rows")
        return table

    def provenance(self, paths: Iterable[str], *, of_times: bool = False) -> str:
        """Say that the runs of a figure were measured and on what, or where they come from.

        Of times it also says of how many runs they may be too long, since the machine was busy.
        """
        runs = self.runs[self.runs["path"].isin(set(paths))]
        parts = []
        for source in SOURCES:
            rows = runs[runs["source"] == source]
            if rows.empty:
                continue
            described = (rows["device"] + " " + rows["hardware"]).str.strip()
            devices = "; ".join(name for name in described.unique() if name)
            if links := shaped_links(rows["link_mbit"]):
                devices = f"{devices}, {links}"
            if source == MEASURED:
                devices = devices or "device not stated in the log"
            parts += [f"{source} · {devices}" if devices else source]
        if of_times and (busy := int((runs["busy"] != "").sum())):
            began = f"{busy} of {len(runs)} runs" if len(runs) > 1 else "the run"
            parts += [f"other programs used much of the machine when {began} began"]
        return " · ".join(parts)


def read_tables(folder: Path, study: Study | None = None) -> Tables:
    """Read ``runs.csv`` and ``iterations.csv``; the others are read when a figure asks for them.

    Args:
        folder: Where the tables lie.
        study: What declares their fields; by default :func:`study_of` the folder.

    Raises:
        PlotError: a table is missing, is not one of ours, or has no rows.
    """
    study = study or study_of(folder)
    times = [f"{phase}{end}" for phase in study.phases for end in ("_ms", "_median_ms")]
    runs = _read(folder / RUNS_FILE, study, _RUNS_NEED, (*_OPTIONAL, *times, *study.all_fields))
    if runs.empty:
        raise PlotError(f"{folder / RUNS_FILE}: has no rows")
    needed = (*KEYS, "iteration", "loss")
    iterations = _read(folder / "iterations.csv", study, needed, (*_OPTIONAL, *times))
    return Tables(runs, iterations, folder, study)


def _read(
    path: Path, study: Study, needed: Sequence[str], optional: Sequence[str] = ()
) -> pd.DataFrame:
    """Read a table with the columns that are needed, and those that it may lack empty."""
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
    table = table.assign(**{name: "" for name in optional if name not in table})
    if "loss" in needed:
        table["loss_known"] = table["loss"] != ""
    for column in set(table.columns) - _TEXT - {"loss_known"}:
        row = study.all_fields.get(column)
        if column.startswith("model.") or (row and row.type == "str"):
            continue
        if row and row.type == "bool":
            table[column] = table[column].str.lower().replace({"true": "1", "false": "0"})
        table[column] = pd.to_numeric(table[column], errors="coerce")
    if "source" in table:
        table["source"] = table["source"].replace("", MEASURED)
    return table
