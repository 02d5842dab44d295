"""Runs to tables: one row a run, one row an iteration. A cell is empty where nobody says."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import pandas as pd

from parse.errors import LogError
from parse.records import Iteration, Log, after_warmup, values_ms
from parse.run_folder import Run
from parse.verdict import judge_log

_TIMES = (
    *("iteration", "forward", "backward", "backward_inner", "backward_allreduce"),
    *("update", "optimizer_step"),
)
RUN_COLUMNS = {
    "path": "string",
    "model": "string",
    "tp": "Int64",
    "dp": "Int64",
    "global_batch_size": "Int64",
    "micro_batch_size": "Int64",
    "offload_ratio": "Float64",
    "subgroup_numel": "Int64",
    "engine": "string",
    "stride": "Int64",
    "iterations": "Int64",
    **{f"{name}_ms": "Float64" for name in _TIMES},
    "tflops": "Float64",
    "loss_first": "string",
    "loss_last": "string",
    "verdict": "string",
    "parameters": "Int64",
    "verdict_detail": "string",
    "label": "string",
    "case": "string",
    "status": "string",
    "device": "string",
    "hardware": "string",
    "num_ranks": "Int64",
    "vocab_size": "Int64",
    "warmup_iterations": "Int64",
    "timed_iterations": "Int64",
    **{f"{name}_median_ms": "Float64" for name in ("iteration", "forward", "backward", "update")},
    "rejects": "Int64",
}
"""Columns of ``runs.csv`` and their types; times are means after the warm-up, in ms."""
_ITERATION_NUMBERS = (
    *(f"{name}_ms" for name in _TIMES),
    *("grad_norm", "learning_rate", "tflops", "host_memory_gib", "device_memory_gib"),
)
ITERATION_COLUMNS = {
    "path": "string",
    "label": "string",
    "case": "string",
    "engine": "string",
    "stride": "Int64",
    "iteration": "Int64",
    "warmup": "Int64",
    "loss": "string",
    **dict.fromkeys(_ITERATION_NUMBERS, "Float64"),
    "tokens": "Int64",
    "skipped": "Int64",
}
"""Columns of ``iterations.csv``; ``warmup`` is 1 where statistics leave the iteration out."""


def runs_table(runs: Sequence[Run], warmup: int, base: Path | None = None) -> pd.DataFrame:
    """One row a run, in the order given.

    Args:
        runs: Runs, labelled.
        warmup: First iterations of each to leave out of means.
        base: Folder that paths are written relative to; as given without it.
    """
    return _frame([_run_row(run, warmup, base) for run in runs], RUN_COLUMNS)


def iterations_table(runs: Sequence[Run], warmup: int, base: Path | None = None) -> pd.DataFrame:
    """One row an iteration of every run; see :func:`runs_table`."""
    rows = []
    for run in runs:
        same = {
            "path": shown_path(run.log.path, base),
            "label": run.label,
            "case": run.case,
            "engine": run.log.engine,
            "stride": run.log.settings.get("stride"),
        }
        for position, record in enumerate(run.log.iterations):
            rows.append({**same, **_iteration_row(record), "warmup": int(position < warmup)})
    return _frame(rows, ITERATION_COLUMNS)


def write_tables(
    runs: Sequence[Run], out: Path, warmup: int, base: Path | None = None
) -> list[Path]:
    """Write ``runs.csv`` and ``iterations.csv``; older ones of ours are replaced.

    Raises:
        LogError: a file of that name is not one of ours, or the folder cannot be written.
    """
    tables = {
        "runs.csv": runs_table(runs, warmup, base),
        "iterations.csv": iterations_table(runs, warmup, base),
    }
    paths = [out / name for name in tables]
    try:
        out.mkdir(parents=True, exist_ok=True)
        for path in paths:
            if path.exists() and not path.read_bytes()[:5] == b"path,":
                raise LogError(f"{path}: not a table of this parser; choose another folder")
        for path, table in zip(paths, tables.values(), strict=True):
            replace_text(path, table.to_csv(index=False))
    except OSError as error:
        raise LogError(f"{error.filename or out}: cannot be written: {error.strerror}") from None
    return paths


def replace_text(path: Path, text: str) -> None:
    """Write a file so that a reader finds the old one or the new one, never a part of it."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(text, encoding="utf-8", errors="replace")
    beside.replace(path)


def shown_path(path: Path, base: Path | None) -> str:
    """A path as tables name it: relative to ``base`` where it lies below."""
    if base is not None and path.is_relative_to(base):
        return path.relative_to(base).as_posix()
    return str(path)


def _run_row(run: Run, warmup: int, base: Path | None) -> dict[str, Any]:
    log, settings = run.log, run.log.settings
    verdict = judge_log(log)
    losses = [r.best_loss for r in log.iterations if r.best_loss is not None]
    row: dict[str, Any] = {
        **{key: settings.get(key) for key in RUN_COLUMNS if key in settings},
        **{f"{name}_ms": _mean(values_ms(log, name, warmup)) for name in _TIMES},
        "path": shown_path(log.path, base),
        "iterations": len(log.iterations),
        "tflops": _mean(_tflops(log, warmup)),
        "loss_first": _loss_text(losses[0]) if losses else None,
        "loss_last": _loss_text(losses[-1]) if losses else None,
        "verdict": verdict.word or None,
        "verdict_detail": verdict.text if verdict.word else None,
        "parameters": log.parameters,
        "label": run.label,
        "case": run.case or None,
        "status": run.status or None,
        "device": log.device,
        "hardware": run.hardware or None,
        "num_ranks": log.world_size,
        "vocab_size": log.vocab_size,
        "warmup_iterations": warmup,
        "timed_iterations": len(values_ms(log, "iteration", warmup)),
        "rejects": len(log.rejects),
    }
    for name in ("iteration", "forward", "backward", "update"):
        values = values_ms(log, name, warmup)
        row[f"{name}_median_ms"] = median(values) if values else None
    return row


def _iteration_row(record: Iteration) -> dict[str, Any]:
    loss = record.best_loss
    return {
        "iteration": record.iteration,
        "loss": None if loss is None else _loss_text(loss),
        **{name: _of(record, name) for name in _ITERATION_NUMBERS},
        "tokens": record.tokens,
        "skipped": record.skipped,
    }


def _of(record: Iteration, name: str) -> float | None:
    if name.endswith("_ms"):
        return record.phase_ms(name.removesuffix("_ms"))
    value: float | None = getattr(record, name)
    return value


def _tflops(log: Log, warmup: int) -> list[float]:
    return [r.tflops for r in after_warmup(log.iterations, warmup) if r.tflops is not None]


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def _loss_text(loss: float) -> str:
    """As text, so that a NaN that was measured is not an empty cell, which means unknown."""
    return repr(loss)


def _frame(rows: list[dict[str, Any]], columns: dict[str, str]) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=list(columns)).astype(columns)
