"""Reads runs: a log, with ``run.json`` and ``status.json`` if they lie beside it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from parse.errors import LogError
from parse.log.read import read_log
from parse.log.records import Log, Setting
from parse.monitor import monitor_files
from parse.unmeasured import MEASURED, read_values, source_of

SWEEP_FILE = "sweep.json"


@dataclass
class Run:
    """One run, from a run folder or from a lone log."""

    log: Log
    point: dict[str, Any] = field(default_factory=dict)
    """``point`` of ``run.json``; empty for a lone log."""
    run_json: dict[str, Any] = field(default_factory=dict)
    status_json: dict[str, Any] = field(default_factory=dict)
    label: str = ""
    """Name in tables and figures, unique among the runs read together."""
    case: str = ""
    """The settings that vary among the runs read together, without the engine."""
    monitor_files: list[Path] = field(default_factory=list)
    """Files of samples that were taken beside the run."""

    @property
    def status(self) -> str:
        """``ok``, ``failed``, ...; empty when not recorded."""
        return str(self.status_json.get("status") or "")

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
        return self.status in ("", "ok")

    @property
    def cause(self) -> str:
        """Why the run is not ``ok``, in one line."""
        return str(self.status_json.get("cause") or "")

    @property
    def repeat(self) -> int | None:
        """Which repeat of its point the run is, from 1; None when not recorded."""
        found = self.run_json.get("repeat")
        whole = isinstance(found, int) and not isinstance(found, bool) and found > 0
        return found if whole else None

    @property
    def point_key(self) -> str:
        """Hash of the settings and the data of the run; empty when not recorded."""
        return _text(self.run_json.get("point_key"))

    @property
    def run_id(self) -> str:
        """The run's name, unique in its sweep; empty when not recorded."""
        return _text(self.run_json.get("run_id"))

    @property
    def started(self) -> str:
        """When it began, in ISO 8601; empty when not recorded."""
        return _text(self.run_json.get("started"))

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
    def on_cpu(self) -> bool:
        """Whether the model lived on the CPU, so that times say nothing about a GPU."""
        return (self.log.device or "").startswith("cpu")


def read_run(log_path: Path) -> Run:
    """Read a log, with its ``run.json`` and ``status.json`` when it lies in its own run folder.

    Raises:
        LogError: there is no readable log.
    """
    run_json = read_json(log_path.parent / "run.json")
    own = run_json.get("log") == log_path.name
    unmeasured = own and source_of(run_json) != MEASURED
    log = read_values(log_path) if unmeasured else read_log(log_path)
    if not own:
        return Run(log, monitor_files=monitor_files(log_path, own_folder=False))
    point = run_json.get("point")
    point = point if isinstance(point, dict) else {}
    log.settings.update(_settings(point))
    status_json = read_json(log_path.parent / "status.json")
    samples = monitor_files(log_path, own_folder=True)
    return Run(log, point, run_json, status_json, monitor_files=samples)


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


def read_json(path: Path) -> dict[str, Any]:
    """Read the object of a JSON file; empty when the file is missing or damaged."""
    try:
        value = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


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
        repeat, status = item.get("repeat"), _text(item.get("status"))
        repeat = repeat if isinstance(repeat, int) and not isinstance(repeat, bool) else None
        entries.append(SweepEntry(name, engine, run_dir, log_path, repeat, status))
    return entries


def read_sweep_run(entry: SweepEntry) -> Run:
    """Read a run of a sweep, even if it never wrote a log."""
    try:
        return read_run(entry.log_path)
    except LogError:
        run_json = read_json(entry.run_dir / "run.json")
        point = run_json.get("point")
        point = point if isinstance(point, dict) else {}
        settings = _settings(point) or ({"engine": entry.engine} if entry.engine else {})
        log = Log(path=entry.log_path, settings=settings, notes=["no log"])
        run_json = {"repeat": entry.repeat, **run_json}
        status_json = {"status": entry.status, **read_json(entry.run_dir / "status.json")}
        samples = monitor_files(entry.log_path, own_folder=True)
        return Run(log, point, run_json, status_json, monitor_files=samples)


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _settings(point: dict[str, Any]) -> dict[str, Setting]:
    """Settings of a point, under the same keys as those of a log's name."""
    names = (
        *("tp", "dp", "global_batch_size", "micro_batch_size", "offload_ratio"),
        *("subgroup_numel", "engine", "stride", "hog_share", "seed"),
    )
    settings: dict[str, Setting] = {
        name: point[name] for name in names if isinstance(point.get(name), int | float | str)
    }
    model = point.get("model")
    if isinstance(model, dict):
        own = {"model": "name", "num_layers": "layers", "hidden": "hidden", "heads": "heads"}
        own["seq_length"] = "seq_length"
        settings |= {k: model[v] for k, v in own.items() if isinstance(model.get(v), int | str)}
    elif isinstance(model, str):
        settings["model"] = model
    return settings
