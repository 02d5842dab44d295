"""Who runs a run: the launcher's process, known again after a crash or on another machine."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import psutil


@dataclass(frozen=True)
class Driver:
    """A launcher's process; a process id alone would be somebody else's after a reboot."""

    pid: int
    started: float
    """Start of the process, in s since the epoch, as the kernel has it."""
    boot_id: str
    """Of the kernel's run."""
    host: str
    token: str = ""
    """Marks the processes of its run in their environment, see :mod:`launch.process.supervise`."""

    @classmethod
    def this_process(cls, token: str = "") -> Self:
        """The process that asks."""
        pid = os.getpid()
        started = psutil.Process(pid).create_time()
        return cls(pid, started, _boot_id(), socket.gethostname(), token)

    @classmethod
    def read(cls, value: object) -> Self | None:
        """From ``status.json``; None when it names no driver."""
        fields: dict[str, Any] = value if isinstance(value, dict) else {}
        try:
            return cls(**fields)
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
