"""What was measured of each point, read from tables, a sweep folder, a run folder or logs."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from parse.compare.comparisons import TIMED_PHASES, compare_points
from parse.compare.pairs import group_points
from parse.compare.verdict import judge_log
from parse.errors import LogError
from parse.labels import label_runs
from parse.log.records import Setting, engine_label
from parse.run_folder import SWEEP_FILE, Run, find_logs, read_run, read_sweep_run, sweep_entries
from parse.unmeasured import MEASURED

_NOT_IDENTITY = ("name", "data_prefix", "iterations", "device", "split")
"""Fields of a point that do not say which point it is."""
_TABLE_FIELDS = (
    *("model", "tp", "dp", "global_batch_size", "micro_batch_size", "offload_ratio"),
    *("subgroup_numel", "engine", "stride", "seq_length", "num_layers", "hidden", "heads"),
    *("hog_share", "seed"),
)
"""Columns of ``runs.csv`` that say which point a run is of, where the table has them."""
_OF_MODEL = {
    "model": "name",
    "num_layers": "layers",
    **{name: name for name in ("hidden", "heads", "seq_length")},
}
"""Names that logs give to fields of a model."""
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
    """Against vanilla; empty where nobody compared."""
    hardware: list[str] = field(default_factory=list)
    """Machines of the repeats, each once; empty where nobody says."""

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
        runs = [read_sweep_run(entry) for entry in sweep_entries(path)]
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
        point = Measured(_fields_of(first), group.label, equality=equality.get(id(first), ""))
        point.times_ms = {phase: group.times_ms(phase, warmup) for phase in TIMED_PHASES}
        for run in group.runs:
            point.add_run(
                judge_log(run.log).word, run.status, _machine(run.log.device, run.hardware)
            )
        points.append(point)
    return points


def _machine(device: str | None, hardware: str | None) -> str:
    return " ".join(part for part in (device, hardware) if part)


def _fields_of(run: Run) -> dict[str, str]:
    """What the point says; only of a lone log what its name or its lines do.

    A run that failed early has a point like any other, but a log that says less, or none.
    """
    fields: dict[str, object] = dict(run.point) or dict(run.log.settings)
    model = fields.get("model")
    if isinstance(model, dict):
        fields |= {name: model.get(own) for name, own in _OF_MODEL.items()}
        fields |= {f"model.{name}": value for name, value in model.items()}
    known = {k: str(v) for k, v in fields.items() if isinstance(v, int | float | str)}
    return _normal({name: text for name, text in known.items() if name not in _NOT_IDENTITY})


def _normal(fields: dict[str, str]) -> dict[str, str]:
    """One spelling for each value, and what is left out where it has only one meaning."""
    found = {name: _spelling(text) for name, text in fields.items()}
    if found.get("engine") and found["engine"] != "hybrid":
        found["stride"] = "0"
    found["hog_share"] = found.get("hog_share") or "0"
    return found


def _spelling(text: str) -> str:
    try:
        return f"{float(text):.12g}"
    except ValueError:
        return text


def _from_tables(folder: Path) -> list[Measured]:
    times = _times_of_tables(folder / "iterations.csv")
    points: dict[str, Measured] = {}
    rows = _rows(folder / "runs.csv", ("path", "engine", "label", "verdict"))
    _refuse_unmeasured(folder, (row.get("source", "") for row in rows))
    for row in rows:
        fields = _normal({name: row[name] for name in _TABLE_FIELDS if name in row})
        settings: dict[str, Setting] = {"engine": row["engine"]} if row["engine"] else {}
        if row.get("stride", "0") not in ("", "0"):
            settings["stride"] = row["stride"]
        label = ", ".join(part for part in (row.get("case", ""), engine_label(settings)) if part)
        point = points.setdefault(repr(sorted(fields.items())), Measured(fields, label))
        machine = _machine(row.get("device"), row.get("hardware"))
        point.add_run(_word(row["verdict"]), row.get("status", ""), machine)
        if row.get("status", "") in ("", "ok"):
            for phase in TIMED_PHASES:
                found = times.get(row["path"], {}).get(phase)
                if found:
                    point.times_ms.setdefault(phase, []).append(found)
    if (folder / "comparisons.csv").is_file():
        for row in _rows(folder / "comparisons.csv", ("label", "equality")):
            for point in points.values():
                if point.label == row["label"]:
                    point.equality = row["equality"]
    return list(points.values())


def _times_of_tables(path: Path) -> dict[str, dict[str, list[float]]]:
    """Times of the iterations after the warm-up, by path of the run and phase."""
    found: dict[str, dict[str, list[float]]] = {}
    for row in _rows(path, ("path", "iteration_ms")):
        if row.get("warmup", "0") not in ("", "0"):
            continue
        for phase in TIMED_PHASES:
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
