"""Runs to tables: runs, iterations, memory, samples, and the study that they are of.

A cell is empty where nothing says what belongs there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from configs.study import Study
from parse.compare.verdict import judge_log
from parse.errors import LogError
from parse.log.records import Iteration, after_warmup, as_number
from parse.monitor import SAMPLE_COLUMNS, read_samples
from parse.run_folder import Run
from parse.write import (
    Columns,
    check_our_json,
    check_ours,
    empty_columns,
    remove_table,
    replace_text,
    write_table,
)

STUDY_FILE = "study.json"
_TIMERS = (
    *("iteration", "forward", "backward", "backward_inner", "backward_allreduce"),
    *("update", "optimizer_step"),
)
"""What DeepSpeed's timers print, whichever of them the study calls a phase."""
_KINDS = {"int": "Int64", "bool": "Int64", "float": "Float64", "str": "string"}
_EVALUATION = {"validation_loss": "loss", "validation_perplexity": "perplexity"}
"""Columns of an evaluation on the validation split, and their names in ``metrics.jsonl``."""


def field_columns(study: Study, names: Sequence[str]) -> dict[str, str]:
    """Columns of some of a study's fields; a switch that is on is 1."""
    return {name: _KINDS[study.fields[name].type] for name in names}


def engine_fields(study: Study) -> list[str]:
    """Fields of the study that only some of its engines take."""
    return [name for name, row in study.fields.items() if row.only_some_engines]


def time_names(study: Study) -> tuple[str, ...]:
    """``iteration``, and every phase and timer that an iteration may have."""
    return (*_TIMERS, *(name for name in study.phases if name not in _TIMERS))


def run_columns(study: Study) -> dict[str, str]:
    """Columns of ``runs.csv`` and their types; times are means after the warm-up, in ms.

    ``source`` is ``measured``, ``simulated`` (predicted, nothing was run) or ``published`` (by
    others). ``accumulation`` is micro-batches an update, ``update_rate`` the whole model's
    parameters over the mean update, in parameters per second, ``samples_per_s`` the global batch
    over the mean iteration. ``validation_*`` are of the run's last evaluation.
    """
    own = engine_fields(study)
    return {
        **{"path": "string", "model": "string", "tp": "Int64", "dp": "Int64"},
        **{"global_batch_size": "Int64", "micro_batch_size": "Int64"},
        **field_columns(study, [name for name in study.fields if name not in own]),
        "engine": "string",
        **field_columns(study, own),
        "iterations": "Int64",
        **{f"{name}_ms": "Float64" for name in time_names(study)},
        "tflops": "Float64",
        **dict.fromkeys(("loss_first", "loss_last", "verdict"), "string"),
        "parameters": "Int64",
        **dict.fromkeys(("verdict_detail", "label", "case", "status"), "string"),
        **{"device": "string", "hardware": "string", "num_ranks": "Int64", "vocab_size": "Int64"},
        **{"warmup_iterations": "Int64", "timed_iterations": "Int64"},
        **{f"{name}_median_ms": "Float64" for name in ("iteration", *study.phases)},
        **dict.fromkeys(("rejects", "accumulation", "seed", "repeat"), "Int64"),
        **{"point_key": "string", "update_rate": "Float64", "samples_per_s": "Float64"},
        **dict.fromkeys(("run_id", "started", "source"), "string"),
        **{"pp": "Int64", "dtype": "string", "zero_stage": "Int64", "data_prefix": "string"},
        **dict.fromkeys((*_EVALUATION, *study.results), "Float64"),
    }


_RUN_COLUMNS_OF_ALL = dict.fromkeys(("path", "label", "case", "engine"), "string")
"""What other tables say of the run a row is of."""
_NUMBERS = ("grad_norm", "learning_rate", "tflops", "host_memory_gib", "device_memory_gib")


def iteration_columns(study: Study) -> dict[str, str]:
    """Columns of ``iterations.csv``; ``warmup`` is 1 where statistics leave the iteration out."""
    return {
        **_RUN_COLUMNS_OF_ALL,
        **field_columns(study, engine_fields(study)),
        **{"iteration": "Int64", "warmup": "Int64", "loss": "string"},
        **{f"{name}_ms": "Float64" for name in time_names(study)},
        **dict.fromkeys(_NUMBERS, "Float64"),
        **{"tokens": "Int64", "skipped": "Int64", "source": "string"},
        **dict.fromkeys(_EVALUATION, "Float64"),
    }


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
    return as_columns([run_row(run, warmup, base) for run in runs], run_columns(runs[0].study))


def iterations_table(runs: Sequence[Run], warmup: int, base: Path | None = None) -> Columns:
    """One row an iteration of every run; see :func:`runs_table`."""
    rows = []
    for run in runs:
        same = {**_of_run(run, base), "source": run.source}
        same |= {name: run.settings.get(name) for name in engine_fields(run.study)}
        evaluated = _evaluations(run)
        for position, record in enumerate(run.log.iterations):
            is_early = int(position < run.warmup(warmup))
            row = _iteration_row(run, record) | evaluated.get(record.iteration, {})
            rows.append({**same, **row, "warmup": is_early})
    return as_columns(rows, iteration_columns(runs[0].study))


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
    """Write all tables that have rows, as CSV and Parquet, and ``study.json`` beside them.

    ``runs`` and ``iterations`` are always written; older files of ours are replaced.

    Returns:
        The CSV files; each has a Parquet file of its stem beside it.

    Raises:
        LogError: a file of that name is not one of ours, or the folder cannot be written.
    """
    study = runs[0].study
    tables = {
        "runs.csv": (runs_table(runs, warmup, base), run_columns(study)),
        "iterations.csv": (iterations_table(runs, warmup, base), iteration_columns(study)),
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
        check_our_json(out / STUDY_FILE, "engines")
        for name, (table, types) in tables.items():
            write_table(out / name, table, types)
        for name in more.keys() - tables.keys():
            remove_table(out / name)
        replace_text(out / STUDY_FILE, study.as_json() + "\n")
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
        "engine": run.engine,
    }


def _repeat(table: Columns, same: Mapping[str, Any], count: int) -> None:
    for name, value in same.items():
        table[name] += [value] * count


def run_row(run: Run, warmup: int, base: Path | None = None) -> dict[str, Any]:
    """A run's row of ``runs.csv``, by column."""
    log, settings, skipped = run.log, run.settings, run.warmup(warmup)
    verdict = judge_log(log)
    losses = [r.best_loss for r in log.iterations if r.best_loss is not None]
    times = {name: run.times_ms(name, warmup) for name in time_names(run.study)}
    means = {f"{name}_ms": _mean(found) for name, found in times.items()}
    tflops = [r.tflops for r in after_warmup(log.iterations, skipped) if r.tflops is not None]
    evaluated = list(_evaluations(run).values())
    return {
        **{key: settings.get(key) for key in run_columns(run.study) if key in settings},
        **means,
        **{f"{name}_median_ms": median(found) if found else None for name, found in times.items()},
        "path": shown_path(log.path, base),
        "engine": run.engine,
        "iterations": len(log.iterations),
        "tflops": _mean(tflops),
        # As text, so that a NaN that was measured is not an empty cell, which means unknown.
        "loss_first": repr(losses[0]) if losses else None,
        "loss_last": repr(losses[-1]) if losses else None,
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
        "warmup_iterations": skipped,
        "timed_iterations": len(times["iteration"]),
        "rejects": len(log.rejects),
        "repeat": run.repeat,
        "update_rate": _per_second(log.parameters, means["update_ms"]),
        "samples_per_s": _per_second(settings.get("global_batch_size"), means["iteration_ms"]),
        **{name: run.recorded(name) for name in ("point_key", "run_id", "started")},
        "source": run.source,
        **(evaluated[-1] if evaluated else {}),
        **{name: _end_number(run, name) for name in run.study.results},
    }


def _end_number(run: Run, name: str) -> float | None:
    """A number that the trainer's last line says of the run as a whole."""
    return as_number(run.log.metrics.end.get(name)) if run.log.metrics else None


def _evaluations(run: Run) -> dict[int, dict[str, float]]:
    """Cells of ``validation_*`` by the iteration that was evaluated after."""
    found = {}
    for event in run.log.metrics.evaluations if run.log.metrics else []:
        cells = {column: event.get(name) for column, name in _EVALUATION.items()}
        known = {c: float(v) for c, v in cells.items() if isinstance(v, int | float)}
        found[event.get("iteration", 0)] = known
    return found


def _per_second(count: object, milliseconds: float | None) -> float | None:
    if not isinstance(count, int) or not milliseconds:
        return None
    return count / (milliseconds / 1000)


def _iteration_row(run: Run, record: Iteration) -> dict[str, Any]:
    loss = record.best_loss
    return {
        "iteration": record.iteration,
        "loss": None if loss is None else repr(loss),
        **{f"{name}_ms": run.phase_ms(record, name) for name in time_names(run.study)},
        **{name: getattr(record, name) for name in (*_NUMBERS, "tokens", "skipped")},
    }


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def as_columns(rows: Sequence[Mapping[str, Any]], types: Mapping[str, str]) -> Columns:
    """Rows as a table; a cell that a row lacks is empty."""
    return {name: [row.get(name) for row in rows] for name in types}
