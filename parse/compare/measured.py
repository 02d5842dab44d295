"""What was measured of each point, read from tables, a sweep folder, a run folder or logs."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from configs.errors import ConfigError
from configs.fields import CORE_FIELDS
from configs.files import read_json
from configs.study import Study, default_study, study_from
from parse.compare.comparisons import compare_points, timed_phases
from parse.compare.pairs import group_points
from parse.compare.verdict import FAILED
from parse.errors import LogError
from parse.labels import free_by_gate, label_runs
from parse.run_folder import SWEEP_FILE, Run, find_logs, read_run, read_sweep
from parse.table import STUDY_FILE, run_row
from parse.unmeasured import MEASURED
from parse.write import unguard

_NOT_IDENTITY = ("name", "data_prefix", "iterations", "device", "split", "accumulation")
"""Fields of a point that do not say which point it is."""
_VERDICTS = ("trains", "undecided", "", "diverged", "frozen", "skipped", "nan")
"""Words of a loss, from good to bad; no loss in the log is worse than one that trains."""


@dataclass
class Measured:
    """One point of one side."""

    fields: dict[str, str]
    """Which point it is: settings as text, numbers in one spelling."""
    label: str
    times_ms: dict[str, list[list[float]]] = field(default_factory=dict)
    """By phase: one list a repeat, after the warm-up."""
    verdict: str = "trains"
    """Worst of all repeats; see :class:`parse.compare.verdict.LossVerdict`."""
    failures: list[str] = field(default_factory=list)
    """Statuses of repeats that are not ``ok``."""
    equality: str = ""
    """Against the reference engine; empty where it was not compared."""
    hardware: list[str] = field(default_factory=list)
    """Machines of the repeats, each once; empty where it is not recorded."""
    iterations: list[int] = field(default_factory=list)
    """Complete iterations in the log of each repeat that finished."""
    rejects: int = 0
    """Lines of all logs that were left out."""

    @property
    def verdict_rank(self) -> int:
        """Larger is worse."""
        return _VERDICTS.index(self.verdict)

    def join(self, other: Measured) -> None:
        """Take in repeats of the same point."""
        for phase, times in other.times_ms.items():
            self.times_ms.setdefault(phase, []).extend(times)
        self.verdict = max(self.verdict, other.verdict, key=_VERDICTS.index)
        self.failures += other.failures
        self.equality = self.equality or other.equality
        self.iterations += other.iterations
        self.rejects += other.rejects
        self.hardware += [name for name in other.hardware if name not in self.hardware]


def read_measured(path: Path, warmup: int) -> list[Measured]:
    """Points of a folder of tables, a sweep, a run folder or a log.

    Args:
        path: Which of them is found out by what lies there.
        warmup: First iterations to leave out; tables carry their own mark.

    Raises:
        LogError: nothing of that kind is there.
    """
    if (path / SWEEP_FILE).is_file():
        runs = read_sweep(path)
    elif (path / "runs.csv").is_file():
        return _from_tables(path)
    else:
        runs = [run for log in find_logs(path) if (run := read_run(log)).log.recognised]
    if not runs:
        raise LogError(f"{path}: no tables, no sweep and no training log there")
    _refuse_unmeasured(path, (run.source for run in runs))
    label_runs(runs)
    return _from_runs(runs, warmup)


def _refuse_unmeasured(path: Path, sources: Iterable[str]) -> None:
    """Predictions are equal or not by construction: a gate on them would say nothing."""
    others = sorted(set(sources) - {MEASURED, ""})
    if others:
        raise LogError(f"{path}: holds {' and '.join(others)} figures; give measured ones")


def matching_fields(old: Sequence[Measured], new: Sequence[Measured]) -> list[str]:
    """Fields that both sides say something of: what one leaves out cannot tell points apart."""
    known = [{n for point in side for n, v in point.fields.items() if v} for side in (old, new)]
    return sorted(known[0] & known[1])


def by_key(points: Iterable[Measured], names: Sequence[str]) -> dict[tuple[str, ...], Measured]:
    """Points by the values of some fields; those that these do not tell apart are joined."""
    found: dict[tuple[str, ...], Measured] = {}
    for point in points:
        key = tuple(point.fields.get(name, "") for name in names)
        if key in found:
            found[key].join(point)
        else:
            found[key] = point
    return found


def _from_runs(runs: Sequence[Run], warmup: int) -> list[Measured]:
    """One of each run; the first of a point's repeats says whether they are equal."""
    equality = {id(c.ours.runs[0]): c.equality for c in compare_points(runs, warmup)}
    return [
        _of_run(
            {**run_row(run, warmup), "label": group.label},
            _normal(run.fields, run.study),
            {phase: run.times_ms(phase, warmup) for phase in timed_phases(run.study)},
            equality.get(id(run), ""),
        )
        for group in group_points(runs)
        for run in group.runs
    ]


def _of_run(
    row: Mapping[str, Any],
    fields: dict[str, str],
    times_ms: Mapping[str, list[float]],
    equality: str,
) -> Measured:
    """A run as a point, from its row of ``runs.csv`` or what would be written there."""
    verdict, status = row["verdict"] or "", row.get("status") or ""
    finished = status in ("", "ok", *FAILED)
    machine = " ".join(filter(None, (row.get("device"), row.get("hardware"))))
    count, rejects = (_count(row.get(name)) for name in ("iterations", "rejects"))
    return Measured(
        fields,
        row["label"],
        {phase: [times] for phase, times in times_ms.items() if times and finished},
        verdict if verdict in _VERDICTS else "",
        [] if finished else [status],
        equality,
        [machine] if machine else [],
        [count] if finished else [],
        rejects,
    )


def _normal(fields: Mapping[str, object], study: Study) -> dict[str, str]:
    """Fields as text, in one spelling, with those filled in that have only one meaning."""
    known = {name: value for name, value in fields.items() if isinstance(value, int | float | str)}
    found = {name: _spelling(value) for name, value in known.items() if value != ""}
    engine = study.engines.get(found.get("engine", ""))
    for name, row in CORE_FIELDS.items():
        if row.added_later:
            found.setdefault(name, _spelling(row.default))
    for name, row in study.fields.items():
        not_taken = row.only_some_engines and engine is not None and name not in engine.fields
        one_meaning = row.only_some_engines or row.in_pairs == "same"
        if not_taken or (one_meaning and name not in found):
            found[name] = _spelling(row.default)
    left_out = (*_NOT_IDENTITY, *free_by_gate(study))
    return {name: text for name, text in found.items() if name not in left_out}


def _spelling(value: float | str) -> str:
    try:
        return f"{float(value):.12g}"
    except ValueError:
        return str(value)


def _from_tables(folder: Path) -> list[Measured]:
    try:
        study_file = folder / STUDY_FILE
        known = study_file.is_file()
        study = study_from(read_json(study_file), str(study_file)) if known else default_study()
    except ConfigError as error:
        raise LogError(str(error)) from None
    rows = _rows(folder / "runs.csv", ("path", "engine", "label", "verdict"))
    _refuse_unmeasured(folder, (row.get("source", "") for row in rows))
    times = _times_of_tables(folder / "iterations.csv", study)
    compared = folder / "comparisons.csv"
    pairs = _rows(compared, ("label", "equality")) if compared.is_file() else []
    equality = {row["label"]: row["equality"] for row in pairs}
    names = {*study.all_fields, "engine"}
    return [
        _of_run(
            row,
            _normal({name: text for name, text in row.items() if name in names}, study),
            times.get(row["path"], {}),
            # The first of the repeats has the label of the point; the others have a number behind.
            equality.get(row["label"], ""),
        )
        for row in rows
    ]


def _count(cell: object) -> int:
    return int(text) if (text := str(cell)).isdecimal() else 0


def _times_of_tables(path: Path, study: Study) -> dict[str, dict[str, list[float]]]:
    """Times of the iterations after the warm-up, by path of the run and phase."""
    found: dict[str, dict[str, list[float]]] = {}
    for row in _rows(path, ("path", "iteration_ms")):
        if row.get("warmup", "0") not in ("", "0"):
            continue
        for phase in timed_phases(study):
            if text := row.get(f"{phase}_ms", ""):
                try:
                    own = found.setdefault(row["path"], {}).setdefault(phase, [])
                    own.append(float(text))
                except ValueError:
                    raise LogError(f"{path}: '{text[:40]}' is not a time") from None
    return found


def _rows(path: Path, needed: Sequence[str]) -> list[dict[str, str]]:
    try:
        with path.open(encoding="utf-8", errors="replace", newline="") as file:
            rows = list(csv.DictReader(file, restval=""))
    except (OSError, csv.Error) as error:
        raise LogError(f"{path}: cannot be read: {error}") from None
    missing = [name for name in needed if rows and name not in rows[0]]
    if missing:
        raise LogError(f"{path}: column '{missing[0]}' is missing; make it with python -m parse")
    return [{name: unguard(cell) for name, cell in row.items() if name} for row in rows]
