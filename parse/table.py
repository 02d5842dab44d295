"""Runs to tables: runs, iterations, memory, samples. A cell is empty where nobody says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from parse.compare.verdict import judge_log
from parse.errors import LogError
from parse.log.records import Iteration, Log, after_warmup, values_ms
from parse.monitor import SAMPLE_COLUMNS, read_samples
from parse.run_folder import Run
from parse.write import (
    Columns,
    check_ours,
    empty_columns,
    remove_table,
    replace_text as replace_text,
    write_table,
)

_TIMES = (
    *("iteration", "forward", "backward", "backward_inner", "backward_allreduce"),
    *("update", "optimizer_step"),
)
_VALIDATION = ("validation_loss", "validation_perplexity")
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
    "accumulation": "Int64",
    "hog_share": "Float64",
    "seed": "Int64",
    "repeat": "Int64",
    "point_key": "string",
    "update_rate": "Float64",
    "samples_per_s": "Float64",
    "run_id": "string",
    "started": "string",
    "source": "string",
    **dict.fromkeys(_VALIDATION, "Float64"),
}
"""Columns of ``runs.csv`` and their types; times are means after the warm-up, in ms.

``source`` is ``measured``, ``simulated`` (predicted, nothing was run) or ``published`` (by others).
``accumulation`` is micro-batches an update, ``update_rate`` the whole model's parameters over the
mean update, in parameters per second, ``samples_per_s`` the global batch over the mean iteration;
the validation's are those of the last evaluation.
"""
_RUN_COLUMNS_OF_ALL = {
    "path": "string",
    "label": "string",
    "case": "string",
    "engine": "string",
}
"""What other tables say of the run a row is of."""
_ITERATION_NUMBERS = (
    *(f"{name}_ms" for name in _TIMES),
    *("grad_norm", "learning_rate", "tflops", "host_memory_gib", "device_memory_gib"),
)
ITERATION_COLUMNS = {
    **_RUN_COLUMNS_OF_ALL,
    "stride": "Int64",
    "iteration": "Int64",
    "warmup": "Int64",
    "loss": "string",
    **dict.fromkeys(_ITERATION_NUMBERS, "Float64"),
    "tokens": "Int64",
    "skipped": "Int64",
    "source": "string",
    **dict.fromkeys(_VALIDATION, "Float64"),
}
"""Columns of ``iterations.csv``; ``warmup`` is 1 where statistics leave the iteration out."""
_MEMORY_NUMBERS = (
    *("allocated_gib", "max_allocated_gib", "cached_gib", "max_cached_gib"),
    *("host_used_gib", "host_percent"),
)
MEMORY_COLUMNS = {
    **_RUN_COLUMNS_OF_ALL,
    "iteration": "Int64",
    "line": "Int64",
    "title": "string",
    **dict.fromkeys(_MEMORY_NUMBERS, "Float64"),
}
"""Columns of ``memory.csv``; ``line`` is the position in the log, from 1."""
MONITOR_COLUMNS = {**_RUN_COLUMNS_OF_ALL, **SAMPLE_COLUMNS}
"""Columns of ``monitor.csv``."""


def runs_table(runs: Sequence[Run], warmup: int, base: Path | None = None) -> Columns:
    """One row a run, in the order given.

    Args:
        runs: Runs, labelled.
        warmup: First iterations of each to leave out of means.
        base: Folder that paths are written relative to; as given without it.
    """
    return _columns([_run_row(run, warmup, base) for run in runs], RUN_COLUMNS)


def iterations_table(runs: Sequence[Run], warmup: int, base: Path | None = None) -> Columns:
    """One row an iteration of every run; see :func:`runs_table`."""
    rows = []
    for run in runs:
        same = {**_of_run(run, base), "stride": run.log.settings.get("stride")}
        same |= {"source": run.source}
        for position, record in enumerate(run.log.iterations):
            is_early = int(position < run.warmup(warmup))
            rows.append({**same, **_iteration_row(record), "warmup": is_early})
    return _columns(rows, ITERATION_COLUMNS)


def memory_table(runs: Sequence[Run], base: Path | None = None) -> Columns:
    """One row a line of DeepSpeed's ``memory_breakdown``; see :func:`runs_table`."""
    table = empty_columns(MEMORY_COLUMNS)
    own = [name for name in MEMORY_COLUMNS if name not in _RUN_COLUMNS_OF_ALL]
    for run in runs:
        lines = run.log.memory
        _repeat(table, _of_run(run, base), len(lines))
        for name in own:
            table[name] += [getattr(line, name) for line in lines]
    return table


def monitor_table(runs: Sequence[Run], base: Path | None = None) -> Columns:
    """One row a sample and device of every run; see :func:`runs_table`."""
    table = empty_columns(MONITOR_COLUMNS)
    for run in runs:
        for path in run.monitor_files:
            samples, damaged = read_samples(path)
            if damaged:
                run.log.notes.append(f"{path.name}: {damaged} unreadable lines left out")
            _repeat(table, _of_run(run, base), len(samples))
            for position, name in enumerate(SAMPLE_COLUMNS):
                table[name] += [sample[position] for sample in samples]
    return table


def write_tables(
    runs: Sequence[Run], out: Path, warmup: int, base: Path | None = None
) -> list[Path]:
    """Write all tables that have rows, as CSV and Parquet; older ones of ours are replaced.

    ``runs`` and ``iterations`` are always written.

    Returns:
        The CSV files; each has a Parquet file of its stem beside it.

    Raises:
        LogError: a file of that name is not one of ours, or the folder cannot be written.
    """
    tables = {
        "runs.csv": (runs_table(runs, warmup, base), RUN_COLUMNS),
        "iterations.csv": (iterations_table(runs, warmup, base), ITERATION_COLUMNS),
    }
    more = {
        "memory.csv": (memory_table(runs, base), MEMORY_COLUMNS),
        "monitor.csv": (monitor_table(runs, base), MONITOR_COLUMNS),
    }
    tables |= {name: table for name, table in more.items() if table[0]["path"]}
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name in tables:
            check_ours(out / name)
        for name, (table, types) in tables.items():
            write_table(out / name, table, types)
        for name in more.keys() - tables.keys():
            remove_table(out / name)
    except OSError as error:
        raise LogError(f"{error.filename or out}: cannot be written: {error.strerror}") from None
    return [out / name for name in tables]


def shown_path(path: Path, base: Path | None) -> str:
    """A path as tables name it: relative to ``base`` where it lies below."""
    if base is not None and path.is_relative_to(base):
        return path.relative_to(base).as_posix()
    return str(path)


def _of_run(run: Run, base: Path | None) -> dict[str, Any]:
    return {
        "path": shown_path(run.log.path, base),
        "label": run.label,
        "case": run.case,
        "engine": run.log.engine,
    }


def _repeat(table: Columns, same: Mapping[str, Any], count: int) -> None:
    for name, value in same.items():
        table[name] += [value] * count


def _run_row(run: Run, warmup: int, base: Path | None) -> dict[str, Any]:
    log, settings, warmup = run.log, run.log.settings, run.warmup(warmup)
    verdict = judge_log(log)
    losses = [r.best_loss for r in log.iterations if r.best_loss is not None]
    evaluated = [r for r in log.iterations if r.validation_loss is not None][-1:]
    times = {f"{name}_ms": _mean(values_ms(log, name, warmup)) for name in _TIMES}
    row: dict[str, Any] = {
        **{key: settings.get(key) for key in RUN_COLUMNS if key in settings},
        **times,
        "path": shown_path(log.path, base),
        "iterations": len(log.iterations),
        "tflops": _mean(_tflops(log, warmup)),
        "loss_first": _loss_text(losses[0]) if losses else None,
        "loss_last": _loss_text(losses[-1]) if losses else None,
        "verdict": verdict.word or None,
        "verdict_detail": verdict.text if verdict.word else None,
        "parameters": log.parameters,
        "label": run.label,
        "case": run.case,
        "status": run.status,
        "device": log.device,
        "hardware": run.hardware,
        "num_ranks": log.world_size,
        "vocab_size": log.vocab_size,
        "warmup_iterations": warmup,
        "timed_iterations": len(values_ms(log, "iteration", warmup)),
        "rejects": len(log.rejects),
        "accumulation": _accumulation(settings),
        "repeat": run.repeat,
        "point_key": run.point_key,
        "update_rate": _per_second(log.parameters, times["update_ms"]),
        "samples_per_s": _per_second(settings.get("global_batch_size"), times["iteration_ms"]),
        "run_id": run.run_id,
        "started": run.started,
        "source": run.source,
        **{name: getattr(record, name) for record in evaluated for name in _VALIDATION},
    }
    for name in ("iteration", "forward", "backward", "update"):
        values = values_ms(log, name, warmup)
        row[f"{name}_median_ms"] = median(values) if values else None
    return row


def _accumulation(settings: Mapping[str, Any]) -> int | None:
    """Micro-batches an update; None unless the batch is a whole number of them."""
    batch, micro, dp = (
        settings.get(name) for name in ("global_batch_size", "micro_batch_size", "dp")
    )
    if not (isinstance(batch, int) and isinstance(micro, int) and isinstance(dp, int)):
        return None
    return batch // (micro * dp) if micro * dp > 0 and batch % (micro * dp) == 0 else None


def _per_second(count: object, milliseconds: float | None) -> float | None:
    if not isinstance(count, int) or not milliseconds:
        return None
    return count / (milliseconds / 1000)


def _iteration_row(record: Iteration) -> dict[str, Any]:
    loss = record.best_loss
    return {
        "iteration": record.iteration,
        "loss": None if loss is None else _loss_text(loss),
        **{name: _of(record, name) for name in _ITERATION_NUMBERS},
        "tokens": record.tokens,
        "skipped": record.skipped,
        **{name: getattr(record, name) for name in _VALIDATION},
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


def _columns(rows: Sequence[Mapping[str, Any]], types: Mapping[str, str]) -> Columns:
    return {name: [row.get(name) for row in rows] for name in types}
