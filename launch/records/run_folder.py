"""The folder of one run, ``RESULTS/SWEEP/STEM/run-NNN``, and what the launcher writes there.

How a run ended is written even where nothing can be written any more.
"""

from __future__ import annotations

import errno
import json
import os
import re
import socket
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import psutil

from configs.errors import ConfigError
from configs.files import json_lines, last_lines, write_json
from configs.schema import Point

SCHEMA_VERSION = 2
"""Of ``run.json``, ``status.json`` and ``sweep.json``."""
FULL_BYTES = 16_384
"""A file system with less room than this holds no traceback and no status."""
_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class Driver:
    """Identifies the launcher's process, so that a crash or another host does not hide it.

    A process id alone would be another process's after a reboot.
    """

    pid: int
    started: float
    """Start of the process, in s since the epoch, as the kernel has it."""
    boot_id: str
    """Of the kernel's run."""
    host: str
    token: str = ""
    """Marks the processes of its run in their environment, see :mod:`launch.process.members`."""

    @classmethod
    def this_process(cls, token: str = "") -> Self:
        """Return the process that asks."""
        started = psutil.Process().create_time()
        return cls(os.getpid(), started, _boot_id(), socket.gethostname(), token)

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
        """Whether it still runs on this machine."""
        if self.is_elsewhere or self.boot_id != _boot_id():
            return False
        try:
            process = psutil.Process(self.pid)
            if process.status() == psutil.STATUS_ZOMBIE:
                return False
            return bool(abs(process.create_time() - self.started) < 1.0)
        except psutil.Error:
            return False


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


@dataclass(frozen=True)
class Status:
    """How a run stands, as ``status.json`` says it."""

    status: str
    """``running``, ``ok``, ``oom-host``, ``oom-device``, ``timeout``, ``hang``, ``failed``,
    ``interrupted``; or, of a run that ended without having trained, ``nan``, ``frozen``,
    ``diverged`` or ``skipped``."""
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

    @property
    def run_json(self) -> Path:
        """What the trainer reads."""
        return self.path / "run.json"

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
            "study": study_of(point),
        }
        write_json(self.run_json, run)

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


def study_of(point: Point) -> dict[str, Any] | None:
    """Return the point's study as it travels with its runs."""
    return None if point.study is None else point.study.as_table()


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
    numbers = [
        int(match[1])
        for path in (stem_dir.iterdir() if stem_dir.is_dir() else ())
        if (match := re.fullmatch(r"run-(\d+)", path.name))
    ]
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
