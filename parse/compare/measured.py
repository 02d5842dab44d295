"""What was measured of each point, read from tables, a sweep folder, a run folder or logs."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from configs.errors import ConfigError
from configs.study import Study, default_study, study_from
from parse.compare.comparisons import compare_points, timed_phases
from parse.compare.pairs import group_points
from parse.compare.verdict import judge_log
from parse.errors import LogError
from parse.labels import free_by_gate, label_runs
from parse.run_folder import SWEEP_FILE, Run, find_logs, read_json, read_run, read_sweep
from parse.table import STUDY_FILE
from parse.unmeasured import MEASURED

_NOT_IDENTITY = ("name", "data_prefix", "iterations", "device", "split", "accumulation")
"""Fields of a point that do not say which point it is."""
_VERDICTS = ("trains", "", "frozen", "nan")
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

    def add_run(self, verdict: str, status: str, hardware: str) -> None:
        """Take in what one repeat says beside its times."""
        if _VERDICTS.index(verdict) > _VERDICTS.index(self.verdict):
            self.verdict = verdict
        if status not in ("", "ok"):
            self.failures.append(status)
        if hardware and hardware not in self.hardware:
            self.hardware.append(hardware)

    @property
    def verdict_rank(self) -> int:
        """Larger is worse."""
        return _VERDICTS.index(self.verdict)


def read_measured(path: Path, warmup: int) -> list[Measured]:
    """Points of a folder of tables, a sweep, a run folder or a log.

    Args:
        path: Which of them is found out by what lies there.
        warmup: First iterations to leave out; tables carry their own mark.

    Raises:
        LogError: nothing of that kind is there.
    """
    if not (path / SWEEP_FILE).is_file() and (path / "runs.csv").is_file():
        return _from_tables(path)
    if (path / SWEEP_FILE).is_file():
        runs = read_sweep(path)
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
        if key not in found:
            found[key] = point
            continue
        first = found[key]
        for phase, times in point.times_ms.items():
            first.times_ms.setdefault(phase, []).extend(times)
        first.add_run(point.verdict, "", "")
        first.failures += point.failures
        first.hardware += [name for name in point.hardware if name not in first.hardware]
    return found


def _from_runs(runs: Sequence[Run], warmup: int) -> list[Measured]:
    equality = {id(c.ours.runs[0]): c.equality for c in compare_points(runs, warmup)}
    points = []
    for group in group_points(runs):
        first = group.runs[0]
        found = equality.get(id(first), "")
        point = Measured(_normal(first.fields, first.study), group.label, equality=found)
        phases = timed_phases(first.study)
        point.times_ms = {phase: group.times_ms(phase, warmup) for phase in phases}
        for run in group.runs:
            point.add_run(
                judge_log(run.log).word, run.status, _machine(run.log.device, run.hardware)
            )
        points.append(point)
    return points


def _machine(device: str | None, hardware: str | None) -> str:
    return " ".join(part for part in (device, hardware) if part)


def _normal(fields: Mapping[str, object], study: Study) -> dict[str, str]:
    """Fields as text, in one spelling, with those filled in that have only one meaning."""
    known = {name: value for name, value in fields.items() if isinstance(value, int | float | str)}
    found = {name: _spelling(value) for name, value in known.items() if value != ""}
    engine = study.engines.get(found.get("engine", ""))
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
    study = _study_of_tables(folder)
    times = _times_of_tables(folder / "iterations.csv", study)
    points: dict[str, Measured] = {}
    rows = _rows(folder / "runs.csv", ("path", "engine", "label", "verdict"))
    _refuse_unmeasured(folder, (row.get("source", "") for row in rows))
    names = {*study.all_fields, "engine"}
    for row in rows:
        fields = _normal({name: text for name, text in row.items() if name in names}, study)
        # The first of the repeats has the label of the point; the others have a number behind it.
        point = points.setdefault(repr(sorted(fields.items())), Measured(fields, row["label"]))
        machine = _machine(row.get("device"), row.get("hardware"))
        point.add_run(_word(row["verdict"]), row.get("status", ""), machine)
        if row.get("status", "") in ("", "ok"):
            for phase, found in times.get(row["path"], {}).items():
                point.times_ms.setdefault(phase, []).append(found)
    if (folder / "comparisons.csv").is_file():
        for row in _rows(folder / "comparisons.csv", ("label", "equality")):
            for point in points.values():
                if point.label == row["label"]:
                    point.equality = row["equality"]
    return list(points.values())


def _study_of_tables(folder: Path) -> Study:
    path = folder / STUDY_FILE
    if not path.is_file():
        return default_study()
    try:
        return study_from(read_json(path), str(path))
    except ConfigError as error:
        raise LogError(str(error)) from None


def _times_of_tables(path: Path, study: Study) -> dict[str, dict[str, list[float]]]:
    """Times of the iterations after the warm-up, by path of the run and phase."""
    found: dict[str, dict[str, list[float]]] = {}
    for row in _rows(path, ("path", "iteration_ms")):
        if row.get("warmup", "0") not in ("", "0"):
            continue
        for phase in timed_phases(study):
            text = row.get(f"{phase}_ms", "")
            if text:
                own = found.setdefault(row["path"], {}).setdefault(phase, [])
                own.append(_number(text, path))
    return found


def _rows(path: Path, needed: Sequence[str]) -> list[dict[str, str]]:
    try:
        with path.open(encoding="utf-8", errors="replace", newline="") as file:
            rows = list(csv.DictReader(file))
    except (OSError, csv.Error) as error:
        raise LogError(f"{path}: cannot be read: {error}") from None
    missing = [name for name in needed if rows and name not in rows[0]]
    if missing:
        raise LogError(f"{path}: column '{missing[0]}' is missing; make it with python -m parse")
    return [{str(k): v or "" for k, v in row.items() if isinstance(v, str | None)} for row in rows]


def _number(text: str, path: Path) -> float:
    try:
        return float(text)
    except ValueError:
        raise LogError(f"{path}: '{text[:40]}' is not a time") from None


def _word(text: str) -> str:
    return text if text in _VERDICTS else ""
