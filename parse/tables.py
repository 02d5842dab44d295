"""Runs to tables: runs, iterations, memory, samples, rejects, and the study that they are of.

Each is a CSV file. A cell is empty where nothing says what belongs there.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

from configs.files import read_json, write_text
from configs.naming import Namer
from configs.study import Study
from deep_optimizer_states.units import GIB
from parse.log import ITERATION_COLUMNS
from parse.records import LogError, after_warmup, as_number, finite
from parse.run import SAMPLE_COLUMNS, Run, group_points

STUDY_FILE = "study.json"
_FORMULA = re.compile(r"'*[-=+@\t\r]")
"""A text that a spreadsheet takes for a formula, or that looks like a guarded one."""
_TIMERS = (
    *("iteration", "forward", "backward", "backward_inner", "backward_allreduce"),
    *("update", "optimizer_step"),
)
"""Times that DeepSpeed's timers print, whichever of them the study calls a phase."""
_EVALUATION = {"validation_loss": "loss", "validation_perplexity": "perplexity"}
"""Columns of an evaluation on the validation split, and their names in ``metrics.jsonl``."""


def engine_fields(study: Study) -> list[str]:
    """Return the fields of the study that only some of its engines take."""
    return [name for name, row in study.fields.items() if row.only_some_engines]


def _numbers(study: Study) -> list[str]:
    """Return those of :func:`engine_fields` that hold numbers or switches.

    Their columns stand beside the engine's. Columns of texts are newer and stand at the end.
    """
    return [name for name in engine_fields(study) if study.fields[name].type != "str"]


def _times(study: Study) -> list[str]:
    return [f"{name}_ms" for name in dict.fromkeys((*_TIMERS, *study.phases))]


def run_columns(study: Study) -> list[str]:
    """Return the columns of ``runs.csv``.

    Times are over the iterations after the warm-up, in ms: ``*_median_ms`` is what tables, figures
    and speed-ups go by, ``*_ms`` the mean. Rates go by the median too.

    ``source`` is ``measured``, ``simulated`` (predicted, nothing was run) or ``published`` (by
    others). ``accumulation`` is micro-batches an update, ``update_rate`` the whole model's
    parameters over the median update, in parameters per second, ``samples_per_s`` the global batch
    over the median iteration, ``tokens_per_s`` its tokens, ``tflops`` the median of what the log
    prints. ``validation_*`` are of the run's last evaluation, ``checkpoint_stall_ms`` is the median
    time that training stood still for a checkpoint, ``checkpoint_lost_ms`` that and what the
    iterations up to the next one took longer than those before the first. ``point`` is the same in
    repeats of one point, as ``comparisons.csv`` takes them together. ``busy`` says what else used
    the machine just before the run was started. A switch that is on is 1.
    """
    own = engine_fields(study)
    columns = [
        *("path", "model", "tp", "dp", "global_batch_size", "micro_batch_size"),
        *(name for name in study.fields if name not in own),
        *("engine", *_numbers(study), "iterations", *_times(study), "tflops"),
        *("loss_first", "loss_last", "verdict", "parameters", "verdict_detail"),
        *("label", "case", "status", "device", "hardware", "num_ranks", "vocab_size"),
        *("warmup_iterations", "timed_iterations"),
        *(f"{name}_median_ms" for name in ("iteration", *study.phases)),
        *("rejects", "accumulation", "seed", "repeat", "point_key", "update_rate"),
        *("samples_per_s", "run_id", "started", "source", "pp", "dtype", "zero_stage"),
        *("data_prefix", *_EVALUATION, *(name for name in study.results if name != SPEEDUP)),
        *("point", "older", "busy"),
        *("running_samples_per_s", "allocated_gib", "max_allocated_gib"),
        *("host_peak_gib", "gpu_peak_gib", "gpu_util_percent", "link_mbit"),
        *(*own, "checkpoint_stall_ms", "checkpoint_lost_ms"),
    ]
    return list(dict.fromkeys(columns))


SPEEDUP = "speedup"
"""A result that is a point's against the reference, and no column of a run."""
_OF_RUN = ("path", "label", "case", "engine")
"""Columns by which other tables name the run that a row belongs to."""
_OTHER_COLUMNS = {
    "memory": (
        *("iteration", "line", "title", "allocated_gib", "max_allocated_gib", "cached_gib"),
        *("max_cached_gib", "host_used_gib", "host_percent"),
    ),
    "throughput": (
        *("line", "step", "micro_step", "running_samples_per_s", "current_samples_per_s"),
        *("allocated_gib", "max_allocated_gib"),
    ),
    "rejects": ("line", "reason", "text"),
    "monitor": SAMPLE_COLUMNS,
}
"""Columns of the tables that there are only where they have rows. ``line`` is the position in the
log, from 1; a throughput line's ``step`` counts the updates since the process was started, which a
run that begins at a checkpoint counts from 1 too."""


def _iteration_columns(study: Study) -> list[str]:
    """Columns of ``iterations.csv``; ``warmup`` is 1 where statistics leave the iteration out."""
    columns = [
        *(*_numbers(study), "iteration", "warmup", "loss", *_times(study)),
        *(*ITERATION_COLUMNS, "host_memory_gib", "device_memory_gib", "source", *_EVALUATION),
        *engine_fields(study),
    ]
    return list(dict.fromkeys(columns))


def write_tables(
    runs: Sequence[Run], out: Path, warmup: int, base: Path | None = None
) -> list[Path]:
    """Write all tables that have rows, and ``study.json`` beside them.

    ``runs`` and ``iterations`` are always written; older files of ours are replaced. Paths in the
    tables are relative to ``base``, if there is one.

    Returns:
        The files of the tables.

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
        "rejects": lambda run: [reject._asdict() for reject in run.log.rejects],
        "monitor": lambda run: run.samples,
    }
    columns = {
        "runs": [*run_columns(study), *of_model],
        "iterations": [*_OF_RUN, *_iteration_columns(study)],
        **{name: [*_OF_RUN, *own] for name, own in _OTHER_COLUMNS.items()},
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
    return written


def _refuse_foreign_tables(out: Path, names: Sequence[str]) -> None:
    """Refuse to replace tables in a folder that has no study of ours beside them."""
    if "engines" in read_json(out / STUDY_FILE):
        return
    for name in (STUDY_FILE, *(f"{name}.csv" for name in names)):
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
    times = {name: run.times_ms(name.removesuffix("_ms"), warmup) for name in _times(run.study)}
    medians = {name: median(found) if found else None for name, found in times.items()}
    printed = [record.printed.get("tflops") for record in after_warmup(log.iterations, skipped)]
    tflops = [figure for figure in printed if figure is not None]
    end = log.metrics.end if log.metrics else {}
    row = {
        **{key: settings.get(key) for key in run_columns(run.study) if key in settings},
        **{name: fmean(found) if found else None for name, found in times.items()},
        **{name.replace("_ms", "_median_ms"): found for name, found in medians.items()},
        "iterations": len(log.iterations),
        "tflops": median(tflops) if any(tflops) else None,
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
        "timed_iterations": len(times["iteration_ms"]),
        "rejects": len(log.rejects),
        "repeat": run.repeat,
        "update_rate": _per_second(log.parameters, medians["update_ms"]),
        "samples_per_s": _per_second(settings.get("global_batch_size"), medians["iteration_ms"]),
        "tokens_per_s": _per_second(_tokens(run), medians["iteration_ms"]),
        **{name: run.recorded(name) for name in ("point_key", "run_id", "started", "older")},
        "source": run.source,
        "busy": run.busy,
        "bound_share": _share(as_number(end.get("bound_ms")), medians["iteration_ms"]),
        **_usage(run),
        **(list(_evaluations(run).values()) or [{}])[-1],
        **_checkpoints(run, skipped),
    }
    said = {name: as_number(end.get(name)) for name in run.study.results}
    return {**row, **{name: value for name, value in said.items() if row.get(name) is None}}


def _tokens(run: Run) -> int | None:
    """Return the tokens of an iteration, where every sample is as long."""
    last = run.log.iterations[-1] if run.log.iterations else None
    tokens = last.event.get("tokens") if last else None
    return tokens // last.iteration if last and isinstance(tokens, int) else None


def _checkpoints(run: Run, skipped: int) -> dict[str, float | None]:
    """Return medians in ms: how long training stood still for a checkpoint, and what it lost by it.

    Iterations from one checkpoint to the next are compared with those before the first one. The
    last checkpoint counts only where training goes on after it.
    """
    events = run.log.metrics.checkpoints if run.log.metrics else []
    stalls = [(event.get("iteration"), as_number(event.get("stall_ms"))) for event in events]
    known = {at: ms for at, ms in stalls if isinstance(at, int) and ms is not None}
    times = {r.iteration: r.phase_ms("iteration") for r in run.log.iterations[skipped:]}
    timed = {number: ms for number, ms in times.items() if ms is not None}
    lost, first = [], min(known, default=0)
    before = [ms for number, ms in timed.items() if number <= first]
    for at, following in pairwise([*sorted(known), max(timed, default=0)]):
        after = [ms for number, ms in timed.items() if at < number <= following]
        if before and after:
            lost.append(known[at] + sum(after) - len(after) * median(before))
    stood_still = finite([ms for _, ms in stalls])
    return {
        "checkpoint_stall_ms": median(stood_still) if stood_still else None,
        "checkpoint_lost_ms": median(lost) if lost else None,
    }


def _usage(run: Run) -> dict[str, float | None]:
    """Return what a run took of its machine, by DeepSpeed's lines and the monitor's samples.

    ``running_samples_per_s`` is of the last throughput line, ``allocated_gib`` and
    ``max_allocated_gib`` the largest of all (of a rank's device; on a CPU the rank's resident
    memory). ``host_peak_gib`` is of all the run's processes together; ``gpu_peak_gib`` of the
    fullest GPU; ``gpu_util_percent`` the mean while the run held memory there.
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
        "host_peak_gib": peak_gib("host_used_bytes"),
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


def _share(bound_ms: float | None, iteration_ms: float | None) -> float | None:
    return bound_ms / iteration_ms if bound_ms and iteration_ms else None


def _iteration_rows(run: Run, warmup: int) -> Iterator[dict[str, Any]]:
    same = {"source": run.source, **{n: run.settings.get(n) for n in engine_fields(run.study)}}
    evaluated, skipped = _evaluations(run), run.warmup(warmup)
    for position, record in enumerate(run.log.iterations):
        loss = record.best_loss
        yield {
            **same,
            **vars(record),
            **record.printed,
            **{name: record.phase_ms(name.removesuffix("_ms")) for name in _times(run.study)},
            "loss": None if loss is None else repr(loss),
            "warmup": int(position < skipped),
            **evaluated.get(record.iteration, {}),
        }


# Files


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Make a folder; what cannot be read or written in it is a LogError."""
    if folder.exists() and not folder.is_dir():
        raise LogError(f"{folder}: is a file, where a folder is needed; give another one")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        where = error.filename or folder
        raise LogError(f"{where}: cannot be read or written: {error.strerror}") from None


def write_table(path: Path, rows: Sequence[Mapping[str, Any]], columns: Iterable[str]) -> None:
    """Write rows, dicts by column, as CSV; what ``columns`` does not name is left out.

    Raises:
        OSError: the file cannot be written.
    """
    text, columns = io.StringIO(), list(columns)
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([_cell(row.get(name)) for name in columns] for row in rows)
    write_text(path, text.getvalue())


def _cell(value: object) -> str:
    """Return a value as text; empty where there is none, and guarded where it is a text."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, float):
        return repr(float(value))
    if isinstance(value, int):
        return str(int(value))
    # A bare CR would end the row.
    return guard(str(value).encode(errors="replace").decode().replace("\r", " "))


def guard(cell: str) -> str:
    """Return a text that no spreadsheet takes for a formula: with an apostrophe in front.

    Numbers stay as they are, those that are written as text too.
    """
    return f"'{cell}" if _FORMULA.match(cell) and as_number(cell) is None else cell
