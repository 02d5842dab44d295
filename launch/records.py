"""What runs leave on disk, and what a later call finds out from it.

The run folders, ``RESULTS/SWEEP/STEM/run-NNN``, are the only state: whatever stops a sweep, the
next call reads from them what is still to do. How a run ended is written even on a full disk.
"""

from __future__ import annotations

import errno
import functools
import json
import os
import re
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import psutil

from configs.errors import ConfigError
from configs.files import json_lines, last_lines, read_json, write_json
from configs.schema import Point
from configs.study import Study, default_study
from launch.identity import changes

SCHEMA_VERSION = 2
"""Of ``run.json``, ``status.json`` and ``sweep.json``."""
INTERRUPTED = "interrupted"
SILENCE_S = 1800.0
"""Seconds without a sign of life after which a run of another machine counts as interrupted."""
FULL_BYTES = 16_384
"""A file system with less room than this holds no traceback and no status."""
_Mark = tuple[int, int, int] | None
_FULL = (errno.ENOSPC, errno.EDQUOT)


runs_of_this_process: set[str] = set()
"""Tokens of the runs that this process has begun and not ended."""


@dataclass(frozen=True)
class Driver:
    """Identifies the launcher's process, so that a crash or another host does not hide it.

    A process id alone would be another process's after a reboot.
    """

    pid: int
    started: float
    """Start of the process, in s since the epoch, as the kernel has it."""
    host: str
    token: str = ""
    """Marks the processes of its run in their environment, see :mod:`launch.process.supervise`."""

    @classmethod
    def this_process(cls, token: str = "") -> Self:
        """Return the process that asks."""
        started = psutil.Process().create_time()
        return cls(os.getpid(), started, socket.gethostname(), token)

    @classmethod
    def read(cls, value: object) -> Self | None:
        """Read ``status.json``; None when it names no driver."""
        try:
            return cls(**value) if isinstance(value, dict) else None
        except TypeError:
            return None

    @property
    def is_elsewhere(self) -> bool:
        """Whether it runs, or ran, on another machine, where nobody here can look for it."""
        return self.host != socket.gethostname()

    @property
    def is_alive(self) -> bool:
        """Whether it still runs on this machine, and this run under it."""
        if self.is_elsewhere:
            return False
        if self.token and self.pid == os.getpid():
            return self.token in runs_of_this_process
        try:
            process = psutil.Process(self.pid)
            if process.status() == psutil.STATUS_ZOMBIE:
                return False
            return bool(abs(process.create_time() - self.started) < 1.0)
        except psutil.Error:
            return False


@dataclass(frozen=True)
class Status:
    """How a run stands, as ``status.json`` says it."""

    status: str
    """``running``, ``ok``, ``oom-host``, ``oom-device``, ``timeout``, ``hang``, ``failed``,
    ``interrupted``, or one of :data:`parse.verdict.FAILED`."""
    exit_code: int | None = None
    """Of the ranks' launcher; 128 + signal when a signal ended it; 1 of a run that has not trained;
    None while running."""
    seconds: float | None = None
    """From the start of the ranks to their end."""
    cause: str = ""
    """Why a run is not ``ok``, in a line."""
    driver: Driver | None = None
    """Who runs it; None once it has ended."""


@dataclass(frozen=True)
class RunFolder:
    """Paths of one run."""

    path: Path
    """``RESULTS/SWEEP/STEM/run-NNN``, absolute."""
    log_name: str
    """File name of the log."""

    @property
    def log(self) -> Path:
        """Standard output and error of every rank."""
        return self.path / self.log_name

    @property
    def metrics(self) -> Path:
        """What the trainer measured, one JSON object a line."""
        return self.path / "metrics.jsonl"

    def write_inputs(
        self, point: Point, facts: Mapping[str, Any], ds_config: Mapping[str, Any]
    ) -> None:
        """Write ``run.json``, of the point and what else is known, and ``ds_config.json``."""
        write_json(self.path / "ds_config.json", ds_config)
        run = {
            "schema_version": SCHEMA_VERSION,
            "run_id": f"{self.path.parent.name}/{self.path.name}",
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "log": self.log_name,
            "metrics": self.metrics.name,
            **facts,
            "point": point.model_dump(mode="json"),
            "study": point.study.as_table(),
        }
        write_json(self.path / "run.json", run)

    def write_status(self, status: Status) -> None:
        """Write ``status.json``, with the log's last lines."""
        write_json(self.path / "status.json", _table(status, last_lines(self.log)))

    def record_end(self, status: Status) -> Status:
        """Write ``status.json``; what cannot be written is said on standard error, and we go on.

        A full disk has no room for a new file, but the old one's block can be written anew. Then
        ``last_lines`` are left out; the log has them.

        Returns:
            The status, with what could not be written in its cause.
        """
        try:
            self.write_status(status)
            return status
        except OSError as error:
            lost, number = f"status.json could not be written: {error.strerror}", error.errno
        status = replace(status, cause=f"{status.cause}; {lost}" if status.cause else lost)
        if number in _FULL and _overwrite(self.path / "status.json", status):
            words = f"{status.cause}; written in place, without last_lines"
            status = replace(status, cause=words)
        sys.stderr.write(f"{self.path}: {status.cause}\n")
        return status

    def last_loss(self) -> float | None:
        """Return the loss of the last iteration; None when there is none or it is not finite."""
        losses = [m.get("loss") for m in json_lines(self.metrics) if m.get("event") == "iteration"]
        return losses[-1] if losses else None

    def has_ended(self) -> bool:
        """Return whether the trainer wrote its last line, ``event: end``."""
        return any(line.get("event") == "end" for line in json_lines(self.metrics))


def _table(status: Status, lines: list[str]) -> dict[str, Any]:
    return {"schema_version": SCHEMA_VERSION, **asdict(status), "last_lines": lines}


def _overwrite(path: Path, status: Status) -> bool:
    """Put a short status into the blocks that the file has; False when that fails as well."""
    text = json.dumps(_table(replace(status, driver=None), [])) + "\n"
    try:
        with path.open("r+b") as file:
            file.write(text.encode())
            file.truncate()
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        return False
    return True


def disk_is_full(folder: Path) -> bool:
    """Return whether a file system has no room left for this user."""
    try:
        space = os.statvfs(folder)
    except OSError:
        return False
    return space.f_bavail * space.f_frsize < FULL_BYTES


def results_of(results_dir: Path, study: Study) -> Path:
    """Return ``RESULTS/STUDY``, and ``RESULTS`` itself for the default study.

    Raises:
        ConfigError: it, or a folder above it, is a file.
    """
    found = results_dir if study is default_study() else results_dir / study.name
    for path in (found.absolute(), *found.absolute().parents):
        if path.exists() and not path.is_dir():
            raise ConfigError(f"--results-dir {results_dir}: {path} is a file; give a folder")
    return found


def sweep_dir(results_dir: Path, sweep: str) -> Path:
    """Return ``RESULTS/SWEEP``, absolute.

    Raises:
        ConfigError: the sweep's name is not the name of one folder.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+-]*", sweep):
        raise ConfigError(f"sweep {sweep!r}: use letters, digits, '.', '_', '+' and '-' alone")
    return results_dir.resolve() / sweep


def next_run_path(stem_dir: Path) -> Path:
    """Return the first ``run-NNN`` of a stem that is higher than every one there is."""
    found = stem_dir.glob("run-*") if stem_dir.is_dir() else ()
    numbers = [int(match[1]) for path in found if (match := re.match(r"run-(\d+)$", path.name))]
    return stem_dir / f"run-{max(numbers, default=0) + 1:03d}"


def create_run_folder(results_dir: Path, sweep: str, point: Point) -> RunFolder:
    """Make a new folder for a run; never one that exists, whoever else is making them.

    Raises:
        ConfigError: the folder cannot be made (read-only, full, no permission).
    """
    stem_dir = sweep_dir(results_dir, sweep) / point.log_name.removesuffix(".log")
    try:
        stem_dir.mkdir(parents=True, exist_ok=True)
        while True:
            path = next_run_path(stem_dir)
            try:
                path.mkdir()
            except FileExistsError:
                continue  # another launcher took this number between our look and our mkdir
            return RunFolder(path=path, log_name=point.log_name)
    except OSError as error:
        raise ConfigError(
            f"results folder {str(stem_dir)!r} cannot be made: {error.strerror}; "
            "choose another with --results-dir"
        ) from None


@dataclass(frozen=True)
class Record:
    """A run folder of an earlier or present call."""

    path: Path
    """The run folder, absolute."""
    engine: str
    point_key: str
    setup_key: str
    repeat: int
    log: str
    """File name of the log."""
    status: str
    """As ``status.json`` has it; ``interrupted`` where the launcher is gone."""
    cause: str
    seconds: float | None
    started: str
    """UTC, ISO 8601."""
    driver: Driver | None
    setup: dict[str, Any]
    """What it was run with, as :func:`launch.identity.changes` takes it."""

    @property
    def where(self) -> str:
        """``STEM/run-NNN``."""
        return f"{self.path.parent.name}/{self.path.name}"

    def missing_file(self, writes_metrics: bool) -> str:
        """Say which file that a run is judged by is gone; empty where all are there."""
        folder = RunFolder(self.path, self.log)
        if not folder.log.is_file():
            return "its log is missing"
        lacks = writes_metrics and not folder.metrics.is_file()
        return f"its {folder.metrics.name} is missing" if lacks else ""

    @classmethod
    def read(cls, run_json: Path) -> Self | None:
        """Read a run folder's ``run.json``; None when it is damaged or of an older schema.

        Files that have not changed since they were read last are not read again.
        """
        found = cls._read_files(run_json, _mark(run_json), _mark(_status_of(run_json)))
        is_open = found is not None and found.status in ("", "running")
        if found is None or not is_open or _is_alive(found.driver, found.path):
            return found
        return replace(found, status=INTERRUPTED, cause="its launcher is gone without a word")

    @classmethod
    @functools.lru_cache(maxsize=4096)
    def _read_files(cls, run_json: Path, _of_run: _Mark, _of_status: _Mark) -> Self | None:
        run, status = read_json(run_json), read_json(_status_of(run_json))
        point, setup = run.get("point"), run.get("provenance")
        if not isinstance(point, dict) or not isinstance(run.get("point_key"), str):
            return None
        repeat = run.get("repeat") or 1
        if not isinstance(repeat, int):
            return None
        driver, seconds = Driver.read(status.get("driver")), status.get("seconds")
        word, cause = str(status.get("status") or ""), str(status.get("cause") or "")
        return cls(
            path=run_json.parent,
            engine=str(point.get("engine")),
            point_key=run["point_key"],
            setup_key=str(run.get("setup_key")),
            repeat=repeat,
            log=str(run.get("log")),
            status=word,
            cause=cause,
            seconds=seconds if isinstance(seconds, int | float) else None,
            started=str(run.get("started") or ""),
            driver=driver,
            setup=setup if isinstance(setup, dict) else {},
        )


def _status_of(run_json: Path) -> Path:
    return run_json.with_name("status.json")


def _mark(path: Path) -> _Mark:
    """What changes when a file is written or replaced; None where there is none."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_mtime_ns, stat.st_size


def read_records(sweep_folder: Path) -> list[Record]:
    """Return the runs of a sweep folder, the newest last."""
    found = [Record.read(path) for path in sweep_folder.glob("*/run-*/run.json")]
    return sorted((r for r in found if r is not None), key=lambda r: (r.started, r.path))


def _is_alive(driver: Driver | None, folder: Path) -> bool:
    if driver is None:
        return False
    if not driver.is_elsewhere:
        return driver.is_alive
    times = [path.stat().st_mtime for path in folder.iterdir() if path.is_file()]
    return time.time() - max(times, default=0.0) < SILENCE_S


@dataclass(frozen=True)
class Decision:
    """Whether to run a point now, and why."""

    run: bool
    why: str = ""
    """Empty for a point that is run for the first time."""
    is_done: bool = False
    """Whether it came to a good end before, which stands."""


def decide(
    keys: tuple[str, str, int],
    records: Sequence[Record],
    again: bool,
    setup: Mapping[str, Any],
    writes_metrics: bool,
) -> Decision:
    """Decide whether a point is to be run, after earlier runs of which the newest is last.

    ``keys`` are its point key, the setup key of this call, which is of ``setup``, and the repeat.
    ``again`` runs what is done as well. A run whose log is gone, or its ``metrics.jsonl`` where its
    trainer ``writes_metrics``, is not done: there is nothing left to judge.
    """
    point_key, setup_key, repeat = keys
    own = [r for r in records if (r.point_key, r.repeat) == (point_key, repeat)]
    running = [r for r in own if r.status == "running"]
    if running:
        return Decision(False, f"is running now ({running[-1].where})")
    if again:
        return Decision(True, "--again" if own else "")
    good = [r for r in own if r.status == "ok"]
    done = [r for r in good if r.setup_key == setup_key]
    whole = [r for r in done if not r.missing_file(writes_metrics)]
    if whole:
        return Decision(False, f"done before ({whole[-1].where})", is_done=True)
    if done:
        return Decision(True, f"{done[-1].missing_file(writes_metrics)} ({done[-1].where})")
    if good:
        changed = older(good[-1], setup_key, setup)
        return Decision(True, f"{changed} (since {good[-1].where})")
    if own:
        return Decision(True, f"{own[-1].status} before ({own[-1].where})")
    settings = point_key.partition("-")[0]
    found = [
        r
        for r in records
        if (r.point_key.partition("-")[0], r.repeat, r.status) == (settings, repeat, "ok")
    ]
    return Decision(True, f"data changed (since {found[-1].where})" if found else "")


def older(record: Record, setup_key: str, setup: Mapping[str, Any]) -> str:
    """Say what changed since a run; empty where it is of today's code, versions and processors."""
    if record.setup_key == setup_key:
        return ""
    return changes(record.setup, setup) or "other code, versions or processors"
