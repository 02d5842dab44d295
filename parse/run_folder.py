"""Reads runs: a log, with ``run.json`` and ``status.json`` if they lie beside it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from configs.fields import CORE_FIELDS
from configs.files import read_json
from configs.study import Study, default_study
from parse.compare.verdict import FAILED, LossVerdict, judge_log
from parse.errors import LogError
from parse.log.read import read_log
from parse.log.records import Iteration, Log, after_warmup
from parse.monitor import Sample, monitor_files, read_samples
from parse.unmeasured import MEASURED, read_values, source_of

SWEEP_FILE = "sweep.json"
_OF_MODEL = {
    "num_layers": "model.layers",
    **{name: f"model.{name}" for name in ("hidden", "heads", "seq_length")},
}
"""Names that logs give to fields of the model."""
_LATER_FIELDS = {name: row.default for name, row in CORE_FIELDS.items() if row.added_later}
"""Fields of every point that older runs do not name: they had the default."""


@dataclass
class Run:
    """One run, from a run folder or from a lone log."""

    log: Log
    point: dict[str, Any] = field(default_factory=dict)
    """``point`` of ``run.json``; empty for a lone log."""
    run_json: dict[str, Any] = field(default_factory=dict)
    status_json: dict[str, Any] = field(default_factory=dict)
    study: Study = field(default_factory=default_study)
    """The study that all runs read together are of; :mod:`parse.labels` sets it."""
    name: str = ""
    """Name of the point; its repeats share it."""
    label: str = ""
    """Name in tables and figures, unique among the runs read together."""
    case: str = ""
    """The settings that vary among the runs read together, without the engine."""
    monitor_files: list[Path] = field(default_factory=list)
    """Files of samples that were taken beside the run."""

    @cached_property
    def settings(self) -> dict[str, Any]:
        """What the run was asked for: the point's fields, or else what the log says of them.

        Fields of the model are called ``model.NAME``, as :mod:`configs.naming` has them.
        """
        said = {_OF_MODEL.get(key, key): value for key, value in self.log.settings.items()}
        found: dict[str, Any] = said | flat(self.point)
        if not self.point and self.log.iterations:
            found["iterations"] = self.log.iterations[-1].iteration
        return found | {"accumulation": _accumulation(found)}

    @cached_property
    def monitored(self) -> list[tuple[Path, list[Sample], int]]:
        """Each file of samples, what it holds, and how many of its lines cannot be read."""
        return [(path, *read_samples(path)) for path in self.monitor_files]

    @property
    def campaign(self) -> Path:
        """Folder of what was measured together: of the sweep, or the one that a lone log lies in.

        A run lies in ``SWEEP/POINT/RUN``.
        """
        folder = self.log.path.parent
        return folder.parent.parent if self.run_json else folder

    @property
    def fields(self) -> dict[str, Any]:
        """Fields of the point as names and pairs are made from them.

        A point of an older study has a newer field at its default; of a lone log that says nothing
        of a field, the field is unknown.
        """
        if self.point:
            defaults = {name: row.default for name, row in self.study.fields.items()}
            derived = {"accumulation": self.settings["accumulation"]}
            return {**defaults, **derived, **flat(self.point)}
        # How far a log goes is no setting: it is named where it tells points apart, in labels.
        known, said = {*self.study.all_fields, "engine"} - {"iterations"}, self.settings.items()
        return {key: value for key, value in said if key in known or key.startswith("model.")}

    @property
    def engine(self) -> str | None:
        """Name of the engine; None when not recorded."""
        engine = self.settings.get("engine")
        return None if engine is None else str(engine)

    @property
    def times_phases(self) -> bool:
        """Whether the times of the phases are their own.

        An update that goes on while the next forward runs takes from the forward's time.
        """
        row = self.study.engines.get(self.engine or "")
        ends = True if row is None else row.ends_update
        return not self.settings.get(ends) if isinstance(ends, str) else ends

    def phase_ms(self, record: Iteration, phase: str) -> float | None:
        """Duration of ``iteration`` or of a phase of it, in ms.

        Phases that no log prints are those of ``metrics.jsonl``.
        """
        if phase == "iteration" or hasattr(record, f"{phase}_ms"):
            return record.phase_ms(phase)
        events = self.log.metrics.iterations if self.log.metrics else {}
        value = events.get(record.iteration, {}).get(f"{phase}_ms")
        return float(value) if isinstance(value, int | float) else None

    def times_ms(self, phase: str, warmup: int) -> list[float]:
        """Durations of a phase after the warm-up, in ms; none where they are not its own."""
        if phase in self.study.phases and not self.times_phases:
            return []
        records = after_warmup(self.log.iterations, self.warmup(warmup))
        times = (self.phase_ms(record, phase) for record in records)
        return [time for time in times if time is not None and math.isfinite(time)]

    @property
    def status(self) -> str:
        """``ok``, ``failed``, ...; empty when not recorded.

        A run that ended well but whose loss failed has the word of its loss, such as ``nan``.
        """
        recorded = str(self.status_json.get("status") or "")
        return self.loss.word if recorded == "ok" and self.loss.failed else recorded

    @cached_property
    def loss(self) -> LossVerdict:
        """What the run's loss says of its training."""
        return judge_log(self.log)

    @property
    def source(self) -> str:
        """``measured``, ``simulated`` or ``published``."""
        return source_of(self.run_json)

    def warmup(self, warmup: int) -> int:
        """How many first iterations statistics leave out: 0 for figures that were not measured."""
        return warmup if self.source == MEASURED else 0

    @property
    def finished(self) -> bool:
        """Whether the run reached its end, as far as is recorded."""
        return self.status in ("", "ok", *FAILED)

    @property
    def cause(self) -> str:
        """Why the run is not ``ok``, in one line."""
        of_loss = f"the loss is {self.loss.text}" if self.loss.failed else ""
        return str(self.status_json.get("cause") or of_loss)

    @property
    def repeat(self) -> int | None:
        """Which repeat of its point the run is, from 1; None when not recorded."""
        return _count(self.run_json.get("repeat"))

    def recorded(self, name: str) -> str:
        """A text of ``run.json``, such as ``run_id``; empty when it is not there."""
        return _text(self.run_json.get(name))

    @property
    def provenance(self) -> dict[str, Any]:
        """Versions, hardware and environment of the run; empty when not recorded."""
        found = self.run_json.get("provenance")
        return found if isinstance(found, dict) else {}

    @property
    def hardware(self) -> str:
        """Name of the GPU or CPU that held the model; empty when not recorded."""
        device, name = self.log.device or "", self.log.device_name
        if name:
            return name
        gpus, cpu = self.provenance.get("gpus"), self.provenance.get("cpu")
        if device.startswith("cuda") and isinstance(gpus, list):
            names = [str(gpu.get("name")) for gpu in gpus if isinstance(gpu, dict)]
            return names[0] if names else ""
        if device.startswith("cpu") and isinstance(cpu, dict):
            return str(cpu.get("model") or "")
        return ""

    @property
    def busy(self) -> str:
        """What else used the machine just before the run was started; empty when nothing did."""
        before = self.provenance.get("before")
        return _text(before.get("busy")) if isinstance(before, dict) else ""

    @property
    def on_cpu(self) -> bool:
        """Whether the model lived on the CPU, so that times say nothing about a GPU."""
        return (self.log.device or "").startswith("cpu")


def read_run(log_path: Path) -> Run:
    """Read a log, with its ``run.json`` and ``status.json`` when it lies in its own run folder.

    Raises:
        LogError: there is no readable log.
    """
    run_json = read_json(log_path.parent / "run.json")
    if run_json.get("log") != log_path.name:
        return Run(read_log(log_path), monitor_files=monitor_files(log_path, own_folder=False))
    unmeasured = source_of(run_json) != MEASURED
    return _run_of_folder(read_values(log_path) if unmeasured else read_log(log_path), run_json)


def _run_of_folder(log: Log, run_json: dict[str, Any]) -> Run:
    point = run_json.get("point")
    run = Run(
        log,
        {**_LATER_FIELDS, **point} if isinstance(point, dict) and point else {},
        run_json,
        read_json(log.path.parent / "status.json"),
        monitor_files=monitor_files(log.path, own_folder=True),
    )
    if run.busy:
        log.notes.append(f"the machine was busy when the run began: {run.busy}")
    return run


def attach_samples(runs: Sequence[Run], paths: Sequence[Path]) -> list[Path]:
    """Assign CSV files of the paper's monitor to their runs.

    A file belongs to the run whose log has its name, or to the only run there is.

    Returns:
        The files that belong to no run.
    """
    left = []
    for path in paths:
        named = [run for run in runs if run.log.path.stem == path.stem]
        owners = named if len(named) == 1 else runs if len(runs) == 1 else []
        if not owners:
            left.append(path)
        elif path.resolve() not in {known.resolve() for known in owners[0].monitor_files}:
            owners[0].monitor_files.append(path)
    return left


def find_logs(path: Path) -> list[Path]:
    """Find the logs that a path names: itself, or those below a folder.

    Under a folder with a ``sweep.json`` the logs are the runs it lists, in its order; elsewhere all
    ``*.log``, by name. Links to folders are not followed.

    Raises:
        LogError: there is no such path.
    """
    if path.is_dir():
        return list(_logs_below(path))
    if not path.exists():
        raise LogError(f"{path}: no such file or folder")
    return [path]


def _logs_below(folder: Path) -> Iterator[Path]:
    if (folder / SWEEP_FILE).is_file():
        yield from (path for entry in sweep_entries(folder) if (path := entry.log_path).is_file())
        return
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not path.is_symlink():
            yield from _logs_below(path)
        elif path.suffix == ".log" and path.is_file():
            yield path


@dataclass(frozen=True)
class SweepEntry:
    """One run that ``sweep.json`` lists."""

    name: str
    engine: str
    run_dir: Path
    log_path: Path
    repeat: int | None = None
    """From 1; None in a sweep of schema 1, which did not count them."""
    status: str = ""
    """Status when ``sweep.json`` was written; empty in a sweep of schema 1."""
    older: str = ""
    """What changed since a result that was kept all the same; empty for one of today's code."""


def sweep_entries(folder: Path) -> list[SweepEntry]:
    """List the runs of a sweep in the order they ran; entries that name no folder are left out."""
    runs = read_json(folder / SWEEP_FILE).get("runs")
    entries = []
    for item in runs if isinstance(runs, list) else []:
        if not isinstance(item, dict) or not isinstance(item.get("run_dir"), str):
            continue
        run_dir = folder / item["run_dir"]
        log = item.get("log")
        # Some writers name the log by its path in the sweep, others in the run folder.
        log_path = run_dir / Path(log).name if isinstance(log, str) and log else run_dir / "missing"
        name, engine = str(item.get("name") or run_dir.name), str(item.get("engine") or "")
        repeat, status = _count(item.get("repeat")), _text(item.get("status"))
        older = _text(item.get("older"))
        entries.append(SweepEntry(name, engine, run_dir, log_path, repeat, status, older))
    return entries


def read_sweep(folder: Path) -> list[Run]:
    """Every run that a sweep folder lists, in the order they ran, with a log or without one."""
    runs, study = [], read_json(folder / SWEEP_FILE).get("study")
    for entry in sweep_entries(folder):
        run = read_sweep_run(entry)
        if study is not None:
            run.run_json.setdefault("study", study)
        if entry.older:
            run.run_json["older"] = entry.older
        # Of a run whose launcher is gone only the index knows that it is not running any more.
        if run.status in ("", "running") and entry.status:
            run.status_json["status"] = entry.status
        runs.append(run)
    return runs


def read_sweep_run(entry: SweepEntry) -> Run:
    """Read a run of a sweep, even if it never wrote a log."""
    try:
        return read_run(entry.log_path)
    except LogError:
        log = Log(path=entry.log_path, notes=["no log"])
        run_json = {"repeat": entry.repeat, **read_json(entry.run_dir / "run.json")}
        run = _run_of_folder(log, run_json)
        run.status_json.setdefault("status", entry.status)
        if entry.engine and not run.point:
            log.settings["engine"] = entry.engine
        return run


def flat(point: Mapping[str, Any]) -> dict[str, Any]:
    """A point of ``run.json`` as plain fields, those of its model as ``model.NAME``."""
    model = point.get("model")
    of_model = model if isinstance(model, dict) else {"name": model}
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


def _count(value: object) -> int | None:
    """A whole number from 1; None for anything else."""
    return value if isinstance(value, int) and value is not True and value > 0 else None


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""
