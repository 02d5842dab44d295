"""Runs to tables: runs, iterations, memory, samples, and the study that they are of.

A cell is empty where nothing says what belongs there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean, median
from typing import Any

from configs.naming import Namer
from configs.study import Study
from parse.compare.pairs import group_points
from parse.errors import LogError
from parse.log.records import after_warmup, as_number
from parse.monitor import SAMPLE_COLUMNS
from parse.run_folder import Run
from parse.usage import USAGE_COLUMNS, usage_row
from parse.write import check_our_json, check_ours, remove_table, replace_text, write_table

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
    """Columns of ``runs.csv`` and their types.

    Times are over the iterations after the warm-up, in ms: ``*_median_ms`` is what tables, figures
    and speed-ups go by, ``*_ms`` the mean. Rates go by the median too.

    ``source`` is ``measured``, ``simulated`` (predicted, nothing was run) or ``published`` (by
    others). ``accumulation`` is micro-batches an update, ``update_rate`` the whole model's
    parameters over the median update, in parameters per second, ``samples_per_s`` the global batch
    over the median iteration, ``tflops`` the median of what the log prints. ``validation_*`` are
    of the run's last evaluation. ``point`` is the same in repeats of one point, as
    ``comparisons.csv`` takes them together. ``busy`` says what else used the machine just before
    the run was started.
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
        **dict.fromkeys(("point", "older", "busy"), "string"),
        **{name: "Float64" for name in USAGE_COLUMNS if name not in study.results},
        "link_mbit": "Int64",
    }


def model_columns(runs: Sequence[Run]) -> dict[str, str]:
    """More columns of ``runs.csv``: fields in which runs of one model differ."""
    names = Namer(runs[0].study).varying([run.fields for run in runs])
    return {name: "string" for name in names if name.startswith("model.")}


_RUN_COLUMNS_OF_ALL = dict.fromkeys(("path", "label", "case", "engine"), "string")
"""What other tables say of the run a row is of."""
_NUMBERS = ("grad_norm", "learning_rate", "tflops", "host_memory_gib", "device_memory_gib")
_COUNTS = ("tokens", "skipped")


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
THROUGHPUT_COLUMNS = {
    **_RUN_COLUMNS_OF_ALL,
    **dict.fromkeys(("line", "step", "micro_step"), "Int64"),
    **dict.fromkeys(("running_samples_per_s", "current_samples_per_s"), "Float64"),
    **dict.fromkeys(("allocated_gib", "max_allocated_gib"), "Float64"),
}
"""Columns of ``throughput.csv``: DeepSpeed's throughput lines. ``step`` counts the updates since
the process was started, which a run that begins at a checkpoint counts from 1 too."""
PROFILE_COLUMNS = {
    **_RUN_COLUMNS_OF_ALL,
    **{"line": "Int64", "step": "Int64"},
    **{"quantity": "string", "value": "Float64", "unit": "string"},
}
"""Columns of ``profile.csv``: a row a figure of DeepSpeed's flops profiler."""
REJECT_COLUMNS = {**_RUN_COLUMNS_OF_ALL, "line": "Int64", "reason": "string", "text": "string"}
"""Columns of ``rejects.csv``: lines of logs that were left out, and the beginning of each."""
MONITOR_COLUMNS = {**_RUN_COLUMNS_OF_ALL, **SAMPLE_COLUMNS}
"""Columns of ``monitor.csv``."""


def runs_table(runs: Sequence[Run], warmup: int, base: Path | None) -> list[dict[str, Any]]:
    """One row a run, in the order given; paths are relative to ``base``, if there is one."""
    points = {id(run): group.label for group in group_points(runs) for run in group.runs}
    of_model = model_columns(runs)
    return [
        {name: run.fields.get(name) for name in of_model}
        | run_row(run, warmup)
        | {**_of_run(run, base), "point": points[id(run)]}
        for run in runs
    ]


def _iteration_rows(run: Run, warmup: int) -> Iterator[dict[str, Any]]:
    same: dict[str, Any] = {"source": run.source}
    same |= {name: run.settings.get(name) for name in engine_fields(run.study)}
    evaluated, skipped = _evaluations(run), run.warmup(warmup)
    for position, record in enumerate(run.log.iterations):
        loss = record.best_loss
        yield {
            **same,
            **{name: getattr(record, name) for name in ("iteration", *_NUMBERS, *_COUNTS)},
            **{f"{name}_ms": run.phase_ms(record, name) for name in time_names(run.study)},
            "loss": None if loss is None else repr(loss),
            "warmup": int(position < skipped),
            **evaluated.get(record.iteration, {}),
        }


def _memory_rows(run: Run) -> Iterator[dict[str, Any]]:
    return (asdict(line) for line in run.log.memory)


def _reject_rows(run: Run) -> Iterator[dict[str, Any]]:
    for reject in run.log.rejects:
        yield {"line": reject.line_number, "reason": reject.reason, "text": reject.text}


def _sample_rows(run: Run) -> Iterator[dict[str, Any]]:
    for path, samples, damaged in run.monitored:
        if damaged:
            run.log.notes.append(f"{path.name}: {damaged} unreadable lines left out")
        yield from (dict(zip(SAMPLE_COLUMNS, sample, strict=True)) for sample in samples)


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

    def of_runs(rows_of: Callable[[Run], Iterable[dict[str, Any]]]) -> list[dict[str, Any]]:
        return [{**row, **_of_run(run, base)} for run in runs for row in rows_of(run)]

    tables = {
        "runs.csv": (
            runs_table(runs, warmup, base),
            run_columns(study) | model_columns(runs),
        ),
        "iterations.csv": (
            of_runs(lambda run: _iteration_rows(run, warmup)),
            iteration_columns(study),
        ),
        "memory.csv": (of_runs(_memory_rows), MEMORY_COLUMNS),
        "throughput.csv": (
            of_runs(lambda run: map(asdict, run.log.throughput)),
            THROUGHPUT_COLUMNS,
        ),
        "profile.csv": (of_runs(lambda run: map(asdict, run.log.profile)), PROFILE_COLUMNS),
        "rejects.csv": (of_runs(_reject_rows), REJECT_COLUMNS),
        "monitor.csv": (of_runs(_sample_rows), MONITOR_COLUMNS),
    }
    empty = [name for name in list(tables)[2:] if not tables[name][0]]
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name in tables:
            check_ours(out / name)
        check_our_json(out / STUDY_FILE, "engines")
        for name in empty:
            remove_table(out / name)
            del tables[name]
        for name, (rows, types) in tables.items():
            write_table(out / name, rows, types)
        replace_text(out / STUDY_FILE, study.as_json() + "\n")
    except OSError as error:
        raise LogError(f"{error.filename or out}: cannot be written: {error.strerror}") from None
    return [out / name for name in tables]


def _of_run(run: Run, base: Path | None) -> dict[str, Any]:
    path = run.log.path
    shown = path.relative_to(base).as_posix() if base and path.is_relative_to(base) else str(path)
    return {"path": shown, "label": run.label, "case": run.case, "engine": run.engine}


def run_row(run: Run, warmup: int) -> dict[str, Any]:
    """What ``runs.csv`` says of a run besides its path, name and engine, by column."""
    log, settings, skipped = run.log, run.settings, run.warmup(warmup)
    verdict = run.loss
    losses = [r.best_loss for r in log.iterations if r.best_loss is not None]
    times = {name: run.times_ms(name, warmup) for name in time_names(run.study)}
    means = {f"{name}_ms": fmean(found) if found else None for name, found in times.items()}
    medians = {f"{name}_median_ms": _median(found) for name, found in times.items()}
    tflops = [r.tflops for r in after_warmup(log.iterations, skipped) if r.tflops is not None]
    evaluated = list(_evaluations(run).values())
    return {
        **{key: settings.get(key) for key in run_columns(run.study) if key in settings},
        **means,
        **medians,
        "iterations": len(log.iterations),
        "tflops": _median(tflops),
        # As text, so that a NaN that was measured is not an empty cell, which means unknown.
        "loss_first": repr(losses[0]) if losses else None,
        "loss_last": repr(losses[-1]) if losses else None,
        "verdict": verdict.word or None,
        "verdict_detail": verdict.text if verdict.word else None,
        "parameters": log.parameters,
        "status": run.status,
        "device": log.device,
        "hardware": run.hardware,
        "num_ranks": log.world_size,
        "vocab_size": log.vocab_size,
        "warmup_iterations": skipped,
        "timed_iterations": len(times["iteration"]),
        "rejects": len(log.rejects),
        "repeat": run.repeat,
        "update_rate": _per_second(log.parameters, medians["update_median_ms"]),
        "samples_per_s": _per_second(
            settings.get("global_batch_size"), medians["iteration_median_ms"]
        ),
        **{name: run.recorded(name) for name in ("point_key", "run_id", "started", "older")},
        "source": run.source,
        "busy": run.busy,
        **usage_row(run),
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


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None
