"""Runs to tables: runs, iterations, memory, samples, rejects, and the study that they are of.

Each is a CSV and a Parquet file with the same content. A cell is empty where nothing says what
belongs there.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean, median
from typing import Any

from configs.files import read_json, write_text
from configs.naming import Namer
from configs.study import Study
from parse.records import LogError, after_warmup, as_number
from parse.run import GIB, SAMPLE_COLUMNS, Run, group_points

Rows = Sequence[Mapping[str, Any]]
Types = Mapping[str, str]
"""Column to ``string``, ``Int64`` or ``Float64``, as pandas calls them."""

STUDY_FILE = "study.json"
_LARGEST = 2**63 - 1
_FORMULA = re.compile(r"'*[-=+@\t\r]")
"""A text that a spreadsheet takes for a formula, or that looks like a guarded one."""
_TIMERS = (
    *("iteration", "forward", "backward", "backward_inner", "backward_allreduce"),
    *("update", "optimizer_step"),
)
"""Times that DeepSpeed's timers print, whichever of them the study calls a phase."""
_KINDS = {"int": "Int64", "bool": "Int64", "float": "Float64", "str": "string"}
_EVALUATION = {"validation_loss": "loss", "validation_perplexity": "perplexity"}
"""Columns of an evaluation on the validation split, and their names in ``metrics.jsonl``."""
_USAGE = (
    *("running_samples_per_s", "allocated_gib", "max_allocated_gib"),
    *("host_peak_gib", "gpu_peak_gib", "gpu_util_percent"),
)


def field_columns(study: Study, names: Sequence[str]) -> dict[str, str]:
    """Return the columns of some of a study's fields; a switch that is on is 1."""
    return {name: _KINDS[study.fields[name].type] for name in names}


def engine_fields(study: Study) -> list[str]:
    """Return the fields of the study that only some of its engines take."""
    return [name for name, row in study.fields.items() if row.only_some_engines]


def _time_names(study: Study) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*_TIMERS, *study.phases)))


def _strings(*names: str) -> dict[str, str]:
    return dict.fromkeys(names, "string")


def _integers(*names: str) -> dict[str, str]:
    return dict.fromkeys(names, "Int64")


def _floats(*names: str) -> dict[str, str]:
    return dict.fromkeys(names, "Float64")


def run_columns(study: Study) -> dict[str, str]:
    """Return the columns of ``runs.csv`` and their types.

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
        **_strings("path", "model"),
        **_integers("tp", "dp", "global_batch_size", "micro_batch_size"),
        **field_columns(study, [name for name in study.fields if name not in own]),
        **_strings("engine"),
        **field_columns(study, own),
        **_integers("iterations"),
        **_floats(*(f"{name}_ms" for name in _time_names(study)), "tflops"),
        **_strings("loss_first", "loss_last", "verdict"),
        **_integers("parameters"),
        **_strings("verdict_detail", "label", "case", "status", "device", "hardware"),
        **_integers("num_ranks", "vocab_size", "warmup_iterations", "timed_iterations"),
        **_floats(*(f"{name}_median_ms" for name in ("iteration", *study.phases))),
        **_integers("rejects", "accumulation", "seed", "repeat"),
        **_strings("point_key"),
        **_floats("update_rate", "samples_per_s"),
        **_strings("run_id", "started", "source"),
        **{"pp": "Int64", "dtype": "string", "zero_stage": "Int64", "data_prefix": "string"},
        **_floats(*_EVALUATION, *study.results),
        **_strings("point", "older", "busy"),
        **_floats(*(name for name in _USAGE if name not in study.results)),
    }


_RUN_COLUMNS_OF_ALL = _strings("path", "label", "case", "engine")
"""Columns by which other tables name the run that a row belongs to."""
_NUMBERS = ("grad_norm", "learning_rate", "tflops", "host_memory_gib", "device_memory_gib")
_OTHER_COLUMNS = {
    "memory": {
        **_integers("iteration", "line"),
        **_strings("title"),
        **_floats("allocated_gib", "max_allocated_gib", "cached_gib", "max_cached_gib"),
        **_floats("host_used_gib", "host_percent"),
    },
    "throughput": {
        **_integers("line", "step", "micro_step"),
        **_floats("running_samples_per_s", "current_samples_per_s"),
        **_floats("allocated_gib", "max_allocated_gib"),
    },
    "profile": {
        **_integers("line", "step"),
        **{"quantity": "string", "value": "Float64", "unit": "string"},
    },
    "rejects": {"line": "Int64", **_strings("reason", "text")},
    "monitor": SAMPLE_COLUMNS,
}
"""Columns of the tables that there are only where they have rows. ``line`` is the position in the
log, from 1; a throughput line's ``step`` counts the updates since the process was started, which a
run that begins at a checkpoint counts from 1 too."""


def _iteration_columns(study: Study) -> dict[str, str]:
    """Columns of ``iterations.csv``; ``warmup`` is 1 where statistics leave the iteration out."""
    return {
        **field_columns(study, engine_fields(study)),
        **{"iteration": "Int64", "warmup": "Int64", "loss": "string"},
        **_floats(*(f"{name}_ms" for name in _time_names(study)), *_NUMBERS),
        **{"tokens": "Int64", "skipped": "Int64", "source": "string"},
        **_floats(*_EVALUATION),
    }


def write_tables(
    runs: Sequence[Run], out: Path, warmup: int, base: Path | None = None
) -> list[Path]:
    """Write all tables that have rows, as CSV and Parquet, and ``study.json`` beside them.

    ``runs`` and ``iterations`` are always written; older files of ours are replaced. Paths in the
    tables are relative to ``base``, if there is one.

    Returns:
        The CSV files; each has a Parquet file of its stem beside it.

    Raises:
        LogError: the folder holds tables of somebody else, or cannot be written.
    """
    study = runs[0].study
    varying = Namer(study).varying([run.fields for run in runs])
    of_model = [name for name in varying if name.startswith("model.")]
    points = {id(run): group.label for group in group_points(runs) for run in group.runs}
    row_makers: dict[str, Callable[[Run], Iterable[Mapping[str, Any]]]] = {
        "runs": lambda run: [
            {name: run.fields.get(name) for name in of_model}
            | run_row(run, warmup)
            | {"point": points[id(run)]}
        ],
        "iterations": lambda run: _iteration_rows(run, warmup),
        "memory": lambda run: run.log.memory,
        "throughput": lambda run: run.log.throughput,
        "profile": lambda run: run.log.profile,
        "rejects": lambda run: [reject._asdict() for reject in run.log.rejects],
        "monitor": lambda run: run.samples,
    }
    columns = {
        "runs": run_columns(study) | _strings(*of_model),
        "iterations": _RUN_COLUMNS_OF_ALL | _iteration_columns(study),
        **{name: _RUN_COLUMNS_OF_ALL | own for name, own in _OTHER_COLUMNS.items()},
    }
    written = []
    with writing(out):
        _refuse_foreign_tables(out, (*row_makers, "comparisons"))
        write_text(out / STUDY_FILE, study.as_json() + "\n")
        for name, rows_of in row_makers.items():
            path = out / f"{name}.csv"
            rows = [{**row, **_of_run(run, base)} for run in runs for row in rows_of(run)]
            if rows or name in ("runs", "iterations"):
                write_table(path, rows, columns[name])
                written.append(path)
            else:
                path.unlink(missing_ok=True)
                path.with_suffix(".parquet").unlink(missing_ok=True)
    return written


def _refuse_foreign_tables(out: Path, names: Sequence[str]) -> None:
    """Refuse to replace tables in a folder that has no study of ours beside them."""
    if "engines" in read_json(out / STUDY_FILE):
        return
    ours = [STUDY_FILE, *(f"{name}{suffix}" for name in names for suffix in (".csv", ".parquet"))]
    for name in ours:
        if (out / name).exists():
            raise LogError(f"{out / name}: not a file of this parser; choose another folder")


def _of_run(run: Run, base: Path | None) -> dict[str, Any]:
    path = run.log.path
    shown = path.relative_to(base).as_posix() if base and path.is_relative_to(base) else str(path)
    return {"path": shown, "label": run.label, "case": run.case, "engine": run.engine}


def run_row(run: Run, warmup: int) -> dict[str, Any]:
    """Return what ``runs.csv`` says of a run besides its path, name and engine, by column."""
    log, settings, skipped = run.log, run.settings, run.warmup(warmup)
    losses = [r.best_loss for r in log.iterations if r.best_loss is not None]
    times = {name: run.times_ms(name, warmup) for name in _time_names(run.study)}
    medians = {name: median(found) if found else None for name, found in times.items()}
    tflops = [r.tflops for r in after_warmup(log.iterations, skipped) if r.tflops is not None]
    end = log.metrics.end if log.metrics else {}
    return {
        **{key: settings.get(key) for key in run_columns(run.study) if key in settings},
        **{f"{name}_ms": fmean(found) if found else None for name, found in times.items()},
        **{f"{name}_median_ms": found for name, found in medians.items()},
        "iterations": len(log.iterations),
        "tflops": median(tflops) if tflops else None,
        # As text, so that a NaN that was measured is not an empty cell, which means unknown.
        "loss_first": repr(losses[0]) if losses else None,
        "loss_last": repr(losses[-1]) if losses else None,
        "verdict": run.loss.word or None,
        "verdict_detail": run.loss.text if run.loss.word else None,
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
        "update_rate": _per_second(log.parameters, medians["update"]),
        "samples_per_s": _per_second(settings.get("global_batch_size"), medians["iteration"]),
        **{name: run.recorded(name) for name in ("point_key", "run_id", "started", "older")},
        "source": run.source,
        "busy": run.busy,
        **_usage(run),
        **(list(_evaluations(run).values()) or [{}])[-1],
        **{name: as_number(end.get(name)) for name in run.study.results},
    }


def _usage(run: Run) -> dict[str, float | None]:
    """Return what a run took of its machine, by DeepSpeed's lines and the monitor's samples.

    ``running_samples_per_s`` is of the last throughput line, ``allocated_gib`` and
    ``max_allocated_gib`` the largest of all (of a rank's device; on a CPU the rank's resident
    memory). ``host_peak_gib`` is of all the run's processes together, pages that they share counted
    once where that was looked at; ``gpu_peak_gib`` of the fullest GPU; ``gpu_util_percent`` the
    mean while the run held memory there.
    """

    def peak_gib(*columns: str) -> float | None:
        for column in columns:
            if found := [v for sample in run.samples if (v := sample[column]) is not None]:
                return max(found) / GIB if max(found) > 0 else None
        return None

    lines = run.log.throughput
    busy = [s["gpu_util_percent"] for s in run.samples if s["gpu_memory_run_bytes"] != 0]
    known = [share for share in busy if share is not None]
    return {
        "running_samples_per_s": lines[-1]["running_samples_per_s"] if lines else None,
        "allocated_gib": max((line["allocated_gib"] for line in lines), default=None),
        "max_allocated_gib": max((line["max_allocated_gib"] for line in lines), default=None),
        "host_peak_gib": peak_gib("host_pss_bytes", "host_used_bytes"),
        "gpu_peak_gib": peak_gib("gpu_memory_run_bytes", "gpu_memory_used_bytes"),
        "gpu_util_percent": fmean(known) if known else None,
    }


def _evaluations(run: Run) -> dict[int, dict[str, float]]:
    """Cells of ``validation_*`` by the iteration that was evaluated after."""
    found = {}
    for event in run.log.metrics.evaluations if run.log.metrics else []:
        cells = {column: as_number(event.get(name)) for column, name in _EVALUATION.items()}
        known = {column: value for column, value in cells.items() if value is not None}
        found[event.get("iteration", 0)] = known
    return found


def _per_second(count: object, milliseconds: float | None) -> float | None:
    if not isinstance(count, int) or not milliseconds:
        return None
    return count / (milliseconds / 1000)


def _iteration_rows(run: Run, warmup: int) -> Iterator[dict[str, Any]]:
    same = {"source": run.source, **{n: run.settings.get(n) for n in engine_fields(run.study)}}
    evaluated, skipped = _evaluations(run), run.warmup(warmup)
    for position, record in enumerate(run.log.iterations):
        loss = record.best_loss
        yield {
            **same,
            **vars(record),
            **{f"{name}_ms": record.phase_ms(name) for name in _time_names(run.study)},
            "loss": None if loss is None else repr(loss),
            "warmup": int(position < skipped),
            **evaluated.get(record.iteration, {}),
        }


# Files


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Make a folder; what cannot be read or written in it is a LogError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        where = error.filename or folder
        raise LogError(f"{where}: cannot be read or written: {error.strerror}") from None


def write_table(path: Path, rows: Rows, types: Types) -> None:
    """Write ``path`` as CSV and the Parquet file beside it.

    Args:
        path: The CSV; the Parquet file has its stem.
        rows: Dicts by column; what ``types`` does not name is left out.
        types: The columns.

    Raises:
        OSError: a file cannot be written.
    """
    import pandas as pd  # here: what only reads logs need not wait for it

    columns = {
        name: pd.array([_cell(row.get(name), kind) for row in rows], dtype=kind)
        for name, kind in types.items()
    }
    table = pd.DataFrame(columns)
    beside = path.with_name(f".{path.stem}.{os.getpid()}.parquet")
    try:
        table.to_parquet(beside, index=False)
        beside.replace(path.with_suffix(".parquet"))
    finally:
        beside.unlink(missing_ok=True)
    for name in (name for name, kind in types.items() if kind == "string"):
        table[name] = table[name].map(guard, na_action="ignore")
    write_text(path, table.to_csv(index=False, lineterminator="\n"))


def guard(cell: str) -> str:
    """Return a text that no spreadsheet takes for a formula: with an apostrophe in front.

    Numbers stay as they are, those in a column of texts too.
    """
    return f"'{cell}" if _FORMULA.match(cell) and as_number(cell) is None else cell


def _cell(value: object, kind: str) -> str | float | None:
    """A value as both forms can hold it; None where there is none."""
    if value is None:
        return None
    if kind == "string":
        # An empty text and a missing one are the same cell of a CSV, and a bare CR ends its row.
        return str(value).encode(errors="replace").decode().replace("\r", " ") or None
    assert isinstance(value, int | float)
    if kind == "Int64":
        return int(value) if abs(value) <= _LARGEST else None
    try:
        return None if math.isnan(value) else float(value)
    except OverflowError:
        return None
