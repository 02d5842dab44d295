"""Runs: a log with what lies beside it, the names they get when read together, and their points.

A run folder holds ``run.json``, ``status.json``, the log and ``metrics.jsonl``; where nothing was
run (simulated, published), ``values.json`` in place of a log.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from configs.errors import ConfigError
from configs.files import json_lines, read_given_json, read_json
from configs.naming import Namer
from configs.sources import MEASURED, PUBLISHED, SIMULATED, SOURCES
from configs.study import Study, default_study, study_from
from deep_optimizer_states.units import GIB
from parse.lines import STATE_NAME, is_log_name
from parse.log import read_log
from parse.records import (
    PHASES,
    Iteration,
    Log,
    LogError,
    Metrics,
    after_warmup,
    as_number,
    as_table,
    finite,
)
from parse.verdict import FAILED, LossVerdict, judge_log

INCOMPLETE = "incomplete"
"""Status of a run that ended well, and of whose iterations not all are there any more."""
SWEEP_FILE = "sweep.json"
MONITOR_FILE = "monitor.jsonl"
SAMPLE_COLUMNS = (
    *("time_s", "host_used_bytes", "host_free_bytes", "cpu_percent", "device_id"),
    *("gpu_util_percent", "gpu_memory_used_bytes", "pcie_tx_bytes_per_s", "pcie_rx_bytes_per_s"),
    *("machine_used_bytes", "gpu_memory_run_bytes"),
)
"""Columns of a sample in ``monitor.jsonl``; ``time_s`` counts from the run's start. Memory of the
run's own processes is ``host_used_bytes`` (resident) and ``gpu_memory_run_bytes``; that of the
whole machine ``machine_used_bytes`` and ``gpu_memory_used_bytes``."""
_OF_MODEL = {
    "num_layers": "model.layers",
    **{name: f"model.{name}" for name in ("hidden", "heads", "seq_length")},
}
"""Names that logs give to fields of the model."""


@dataclass
class Run:
    """One run, from a run folder or from a lone log."""

    log: Log
    point: dict[str, Any] = field(default_factory=dict)
    """``point`` of ``run.json``; empty for a lone log."""
    run_json: dict[str, Any] = field(default_factory=dict)
    status_json: dict[str, Any] = field(default_factory=dict)
    study: Study = field(default_factory=default_study)
    """The study that all runs read together are of; :func:`label_runs` sets it."""
    name: str = ""
    """Name of the point; its repeats share it."""
    label: str = ""
    """Name in tables and figures, unique among the runs read together."""
    case: str = ""
    """The settings that vary among the runs read together, without the engine."""

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The point's fields, or else what the log says of them.

        Fields of the model are called ``model.NAME``, as :mod:`configs.naming` has them.
        """
        said = {_OF_MODEL.get(key, key): value for key, value in self.log.settings.items()}
        found: dict[str, Any] = said | _flat(self.point)
        if not self.point and self.log.iterations:
            found["iterations"] = self.log.iterations[-1].iteration
        return found | {"accumulation": _accumulation(found)}

    @cached_property
    def samples(self) -> list[dict[str, float | None]]:
        """Samples of the run folder's ``monitor.jsonl``; a figure that one lacks is None."""
        if not self.run_json:
            return []
        rows = json_lines(self.log.path.parent / MONITOR_FILE)
        found = [{name: as_number(row.get(name)) for name in SAMPLE_COLUMNS} for row in rows]
        return [sample for sample in found if sample["time_s"] is not None]

    @property
    def sweep_dir(self) -> Path:
        """Folder of what was measured together: of the sweep, or the one that a lone log lies in.

        A run lies in ``SWEEP/POINT/RUN``.
        """
        folder = self.log.path.parent
        return folder.parent.parent if self.run_json else folder

    @property
    def fields(self) -> dict[str, Any]:
        """Fields of the point as names and pairs are made from them.

        A field that a lone log says nothing of is unknown.
        """
        if self.point:
            defaults = {name: row.default for name, row in self.study.fields.items()}
            return {**defaults, "accumulation": self.settings["accumulation"], **_flat(self.point)}
        # How far a log goes is no setting: it is named where it tells points apart, in labels.
        known, said = {*self.study.all_fields, "engine"} - {"iterations"}, self.settings.items()
        return {key: value for key, value in said if key in known or key.startswith("model.")}

    @property
    def engine(self) -> str | None:
        """Name of the engine; None when not recorded."""
        return _text(self.settings.get("engine")) or None

    def adopt(self, study: Study) -> None:
        """Take the run as one of a study; its engine gets the name that the study has for it."""
        self.study = study
        for table in (self.point, self.log.settings):
            if "engine" in table:
                table["engine"] = str(study.engine_name(table["engine"]))
        vars(self).pop("settings", None)  # may hold the earlier name

    def times_ms(self, phase: str, warmup: int) -> list[float]:
        """Return the durations of a phase after the warm-up; none where they are not its own.

        An update that goes on while the next forward runs takes from the forward's time.
        """
        if phase in self.study.phases and (row := self.study.engines.get(self.engine or "")):
            ends = row.ends_update
            if bool(self.settings.get(ends)) if isinstance(ends, str) else not ends:
                return []
        records = after_warmup(self.log.iterations, self.warmup(warmup))
        return finite([record.phase_ms(phase) for record in records])

    @property
    def status(self) -> str:
        """``ok``, ``failed``, ...; empty when not recorded.

        A run that ended well but whose loss failed has the word of its loss, such as ``nan``; one
        whose files were cut since is :data:`INCOMPLETE`.
        """
        recorded = str(self.status_json.get("status") or "")
        if recorded == "ok" and self.loss.failed:
            return self.loss.word
        return INCOMPLETE if recorded in ("", "ok") and self.cut_short else recorded

    @property
    def cut_short(self) -> str:
        """How many iterations are there, where the last of its point is not; otherwise empty."""
        wanted, records = self._last_iteration, self.log.iterations
        if self.source != MEASURED or not records or records[-1].iteration >= wanted:
            return ""
        asked = wanted - records[0].iteration + 1
        return f"{len(records)} of {asked} iterations are there"

    @property
    def gap_in_metrics(self) -> str:
        """What is missing in the ``metrics.jsonl`` of a run that ended well; otherwise empty.

        Equality would be judged by the digits that the log prints, or without the final state.
        """
        metrics, records = self.log.metrics, self.log.iterations
        if self.status_json.get("status") != "ok" or not self.recorded("metrics"):
            return ""
        if metrics is None or not records:
            return ""
        last = max(records[-1].iteration, self._last_iteration)
        asked = range(records[0].iteration, last + 1)
        known = sum(metrics.loss(number) is not None for number in asked)
        if known < len(asked):
            return f"{known} of {len(asked)} iterations"
        return "" if metrics.end else "its end is missing"

    @property
    def _last_iteration(self) -> int:
        """The last iteration, as the trainer said at its end, or else the point; 0 if unknown."""
        end = self.log.metrics.end if self.log.metrics else {}
        wanted = end.get("iterations", self.point.get("iterations"))
        return wanted if isinstance(wanted, int) else 0

    @cached_property
    def loss(self) -> LossVerdict:
        """The verdict on the run's loss."""
        return judge_log(self.log)

    @property
    def source(self) -> str:
        """``measured``, ``simulated`` or ``published``."""
        source = self.run_json.get("source")
        return source if source in SOURCES else MEASURED

    def warmup(self, warmup: int) -> int:
        """Return how many first iterations statistics leave out: 0 for what was not measured."""
        return warmup if self.source == MEASURED else 0

    @property
    def finished(self) -> bool:
        """True where the run reached its end, as far as is recorded."""
        return self.status in ("", "ok", *FAILED)

    @property
    def cause(self) -> str:
        """Why the run is not ``ok``, in one line."""
        of_loss = f"the loss is {self.loss.text}" if self.loss.failed else ""
        return str(self.status_json.get("cause") or of_loss or self.cut_short)

    @property
    def repeat(self) -> int | None:
        """The number of the repeat, from 1; None when not recorded."""
        return self.run_json.get("repeat")

    def recorded(self, name: str) -> str:
        """Return a text of ``run.json``, such as ``run_id``; empty when it is not there."""
        return _text(self.run_json.get(name))

    @property
    def provenance(self) -> dict[str, Any]:
        """Versions, hardware and environment of the run; empty when not recorded."""
        return as_table(self.run_json.get("provenance"))

    @property
    def hardware(self) -> str:
        """Name of the GPU or CPU that held the model; empty when not recorded."""
        if self.log.device_name:
            return self.log.device_name
        if self.gpus and (self.log.device or "").startswith("cuda"):
            return str(self.gpus[0].get("name"))
        cpu = as_table(self.provenance.get("cpu"))
        return str(cpu.get("model") or "") if self.log.on_cpu else ""

    @property
    def gpus(self) -> list[dict[str, Any]]:
        """The GPUs of the machine, as ``run.json`` describes them."""
        found = self.provenance.get("gpus")
        return [gpu for gpu in found if isinstance(gpu, dict)] if isinstance(found, list) else []

    @property
    def busy(self) -> str:
        """Who else used the machine just before the run was started; empty when nobody did."""
        return _text(as_table(self.provenance.get("before")).get("busy"))


def read_run(log_path: Path) -> Run:
    """Read a log, with its ``run.json`` and ``status.json`` when it lies in its own run folder.

    Raises:
        LogError: there is no readable log.
    """
    run_json = read_json(log_path.parent / "run.json")
    if run_json.get("log") != log_path.name:
        return Run(read_log(log_path))
    unmeasured = run_json.get("source") in (SIMULATED, PUBLISHED)
    return _run_of_folder(read_values(log_path) if unmeasured else read_log(log_path), run_json)


def _run_of_folder(log: Log, run_json: dict[str, Any]) -> Run:
    status = read_json(log.path.parent / "status.json")
    if not isinstance(repeat := run_json.get("repeat"), int | None):
        # What else is damaged cannot be told: the run is listed, and none of its figures count.
        cause = f"run.json is damaged: its repeat is {json.dumps(repeat)}, no number"
        run_json, status = {**run_json, "repeat": None}, {"status": "failed", "cause": cause}
        log.notes.append(cause)
    run = Run(log, as_table(run_json.get("point")), run_json, status)
    if run.busy:
        log.notes.append(f"the machine was busy when the run began: {run.busy}")
    return run


def read_values(path: Path) -> Log:
    """Return what ``values.json`` says, as a log of one iteration.

    Raises:
        ConfigError: the file is missing, or is not one of ours.
    """
    values = read_given_json(path)
    numbers = {name: as_number(value) for name, value in values.items()}
    record = Iteration(1, printed={"tflops": numbers.get("tflops")})
    if (iteration_ms := numbers.get("iteration_ms")) is not None:
        record.iteration_s = iteration_ms / 1000
    for phase in PHASES:
        setattr(record, f"{phase}_ms", numbers.get(f"{phase}_ms"))
    for side in ("host", "device"):
        if memory := numbers.get(f"{side}_memory_bytes"):
            setattr(record, f"{side}_memory_gib", memory / GIB)
    parameters, ranks = (values.get(name) for name in ("parameters", "num_ranks"))
    timed = any(record.phase_ms(name) is not None for name in ("iteration", *PHASES))
    return Log(
        path=path,
        iterations=[record] if timed else [],
        parameters=parameters if isinstance(parameters, int) else None,
        world_size=ranks if isinstance(ranks, int) else None,
        device_name=_text(values.get("about")) or None,
        recognised=True,
        metrics=Metrics(path, end=values),
    )


def find_logs(path: Path) -> list[Path]:
    """Find the logs that a path names: itself, or those below a folder.

    Under a folder with a ``sweep.json`` the logs are the runs it lists, in its order; elsewhere all
    ``*.log``, packed or not, and what trainers write beside them, by name. Of a trainer's
    checkpoints, each of which tells all that came before, only the last counts, and none where the
    folder above tells more. Links to folders are not followed.

    Raises:
        LogError: there is no such path.
    """
    if not path.exists():
        raise LogError(f"{path}: no such file or folder")
    if not path.is_dir():
        return [path]
    if (path / SWEEP_FILE).is_file():
        return [log for _, log in _sweep_entries(path) if log.is_file()]
    found = []
    passed_over = _earlier_checkpoints(path)
    for below in sorted(path.iterdir()):
        if below.is_dir() and not below.is_symlink():
            found += find_logs(below) if below not in passed_over else []
        elif is_log_name(below) and below.is_file():
            found.append(below)
    return found


def _earlier_checkpoints(folder: Path) -> list[Path]:
    numbers = {path: path.name.removeprefix("checkpoint-") for path in folder.glob("checkpoint-*")}
    states = [
        path for path in numbers if numbers[path].isdecimal() and (path / STATE_NAME).is_file()
    ]
    states.sort(key=lambda path: int(numbers[path]))
    return states if (folder / STATE_NAME).is_file() else states[:-1]


def _sweep_entries(folder: Path) -> list[tuple[dict[str, Any], Path]]:
    """The runs that ``sweep.json`` lists, each with the path of its log."""
    runs = read_json(folder / SWEEP_FILE).get("runs")
    return [
        (item, folder / item["run_dir"] / Path(_text(item.get("log")) or "missing").name)
        for item in (runs if isinstance(runs, list) else [])
        if isinstance(item, dict) and isinstance(item.get("run_dir"), str)
    ]


def read_sweep(folder: Path) -> list[Run]:
    """Return every run that a sweep folder lists, in the order they ran, with or without a log."""
    runs, study = [], read_json(folder / SWEEP_FILE).get("study")
    for entry, log_path in _sweep_entries(folder):
        try:
            run = read_run(log_path)
        except ConfigError:
            log = Log(path=log_path, notes=["no log"])
            kept = read_json(log_path.parent / "run.json")
            run = _run_of_folder(log, {"repeat": entry.get("repeat"), **kept})
            if entry.get("engine") and not run.point:
                log.settings["engine"] = str(entry["engine"])
        if study is not None:
            run.run_json.setdefault("study", study)
        # A run that is not run again may have had another name in the command that ran it.
        if run.point.get("name"):
            run.point["name"] = _text(entry.get("name")) or run.point["name"]
        if older := _text(entry.get("older")):
            run.run_json["older"] = older
        # Of a run whose launcher is gone only the index knows that it is not running any more.
        recorded = str(run.status_json.get("status") or "")
        if recorded in ("", "running") and _text(entry.get("status")):
            run.status_json["status"] = entry["status"]
        runs.append(run)
    return runs


def _flat(point: Mapping[str, Any]) -> dict[str, Any]:
    """A point of ``run.json`` as plain fields, those of its model as ``model.NAME``."""
    model = point.get("model")
    of_model = as_table(model) or {"name": model}
    found = {key: value for key, value in point.items() if key != "model"}
    found |= {f"model.{key}": value for key, value in of_model.items() if key != "name"}
    found["model"] = of_model.get("name")
    return {key: value for key, value in found.items() if isinstance(value, int | float | str)}


def _accumulation(settings: Mapping[str, Any]) -> int | None:
    """Micro-batches an update; None unless the batch is a whole number of them."""
    names = ("global_batch_size", "micro_batch_size", "dp")
    batch, micro, dp = (settings.get(name) for name in names)
    if not (isinstance(batch, int) and isinstance(micro, int) and isinstance(dp, int)):
        return None
    return batch // (micro * dp) if micro * dp > 0 and batch % (micro * dp) == 0 else None


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


# Names of runs that are read together


def label_runs(runs: Sequence[Run], told: Collection[str] = ()) -> Study:
    """Set ``study``, ``case``, ``name`` and ``label`` of every run.

    Points keep the names that they were run under, unless two of different settings share one; what
    others published says so in its name. Fields of ``told``, which a command set, are named even
    where they do not vary. The label adds the repeat, or a number where the repeats are not
    counted, where that is not unique.

    Returns:
        The study that the runs are of.

    Raises:
        LogError: the runs are of several studies, or theirs is damaged.
    """
    study = _study_of(runs)
    namer = Namer(study)
    for run in runs:
        run.adopt(study)
    points = [run.fields for run in runs]
    varying = namer.varying(points, told)
    # Runs that differ in their seed alone are judged together, so no case is named by a seed.
    of_case = [name for name in varying if name not in free_by_gate(study)]
    own = _own_names(points)
    seen: set[tuple[str, str, int]] = set()
    for run, point, given in zip(runs, points, own, strict=True):
        run.case = namer.case(point, of_case)
        said = ", published" if run.source == PUBLISHED else ""
        run.name = f"{given or namer.name(point, varying)}{said}"
        number = run.repeat or 1
        while (run.name, run.source, number) in seen:
            number += 1
        seen.add((run.name, run.source, number))
        run.label = run.name if number == 1 else f"{run.name} #{number}"
    return study


def free_by_gate(study: Study) -> tuple[str, ...]:
    """Return the fields in which the repeats of a point may differ, as the gate allows for it."""
    return () if study.gate.kind == "bitwise" else ("seed",)


def _study_of(runs: Sequence[Run]) -> Study:
    """The study that travelled with the runs; the default one where none did."""
    tables: list[Any] = []
    for run in runs:
        table = run.run_json.get("study")
        if table is not None and table not in tables:
            tables.append(table)
    try:
        studies = [study_from(table, "the study of the runs") for table in tables]
    except ConfigError as error:
        raise LogError(f"{error}; parse it with the version that ran it") from None
    names = sorted({study.name for study in studies})
    if len(names) > 1:
        raise LogError(
            f"runs of the studies {', '.join(names)}: parse each study into a folder of its own"
        )
    engines = {run.point.get("engine") for run in runs}

    def num_known(study: Study) -> int:
        return sum(study.engine_name(engine) in study.engines for engine in engines)

    # A later study has the names that engines had before as aliases.
    return max(reversed(studies), key=num_known, default=None) or default_study()


def _own_names(points: Sequence[dict[str, Any]]) -> list[str]:
    """The points' own names; all empty where one name stands for two points."""
    settings: dict[str, set[str]] = {}
    names = [str(point.get("name") or "") for point in points]
    for name, point in zip(names, points, strict=True):
        rest = {key: value for key, value in point.items() if key != "name"}
        settings.setdefault(name, set()).add(json.dumps(rest, sort_keys=True, default=str))
    unique = all(len(found) == 1 for name, found in settings.items() if name)
    return names if unique else [""] * len(names)


# Points: the repeats of one engine with one set of settings


@dataclass
class PointRuns:
    """All repeats of one point."""

    runs: list[Run]
    label: str
    """Name of the point, unique among those grouped together."""

    @property
    def engine(self) -> str | None:
        """Name of the engine; None when not recorded."""
        return self.runs[0].engine

    @property
    def study(self) -> Study:
        """The study that the point is of."""
        return self.runs[0].study

    @cached_property
    def key(self) -> str:
        """Fields that must agree for two points to compute the same."""
        return _point_key(self.runs[0])

    @cached_property
    def preferred(self) -> list[object]:
        """Values that should agree for the times of two points to be comparable."""
        names = [name for name, row in self.study.all_fields.items() if row.in_pairs == "prefer"]
        return [self.runs[0].settings.get(name) for name in names]

    @property
    def finished(self) -> list[Run]:
        """Runs whose times count, by sweep folder, seed and repeat."""
        return sorted((r for r in self.runs if r.finished and r.log.iterations), key=_place)

    @property
    def repeats(self) -> list[tuple[object, ...] | None]:
        """Campaign, seed and repeat of each finished run, as its sweep counted them."""
        return [_place(run) if run.repeat else None for run in self.finished]

    def times_ms(self, phase: str, warmup: int) -> list[list[float]]:
        """Return the durations of a phase after the warm-up, one list a finished run, in ms."""
        return [run.times_ms(phase, warmup) for run in self.finished]


def group_points(runs: Sequence[Run]) -> list[PointRuns]:
    """Gather the repeats of each point, in the order of their first runs."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(_group_key(run), []).append(run)
    names = [_point_name(members) for members in groups.values()]
    return [
        PointRuns(members, name if names.count(name) == 1 else members[0].label)
        for members, name in zip(groups.values(), names, strict=True)
    ]


def copies(runs: Sequence[Run]) -> list[tuple[Run, Run]]:
    """Return runs whose log says the same as that of an earlier one of their point, with that one.

    They are no repeats: no two runs take the same time to the last digit. :func:`label_runs` must
    have been called.
    """
    first: dict[tuple[str, str], Run] = {}
    found = []
    for run in runs:
        # Runs that failed before anything was timed may well print the same.
        if not run.log.digest or all(r.iteration_s is None for r in run.log.iterations):
            continue
        known = first.setdefault((_group_key(run), run.log.digest), run)
        if known is not run:
            found.append((run, known))
    return found


def _group_key(run: Run) -> str:
    values = [run.settings.get(name, row.default) for name, row in run.study.fields.items()]
    return json.dumps([_point_key(run), run.engine, values, run.settings.get("iterations")])


def _place(run: Run) -> tuple[str, str, int]:
    return str(run.sweep_dir), str(run.settings.get("seed")), run.repeat or 0


def _point_key(run: Run) -> str:
    study = run.study
    taken = study.engines[study.reference].fields
    free = {name for name, row in study.all_fields.items() if row.in_pairs != "same"}
    free |= {n for n, row in study.fields.items() if row.only_some_engines and n not in taken}
    free |= {"name", "engine", *free_by_gate(study), *study.set_by_engines}
    fixed = {key: value for key, value in run.fields.items() if key not in free}
    return json.dumps({**fixed, "source": run.source}, sort_keys=True, default=str)


def _point_name(members: Sequence[Run]) -> str:
    """The name that all runs share; without what differs between seeds where they do not."""
    first = members[0]
    if len({run.name for run in members}) == 1:
        return first.name
    return " ".join([first.case, Namer(first.study).engine(first.fields)])
