"""Counts what the kernel's out-of-memory killer has killed: the evidence behind ``oom-host``."""

from __future__ import annotations

import re
from pathlib import Path

_COUNT = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


class OomKills:
    """Kills since this object was made."""

    def __init__(self, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> None:
        """Choose the nearest counter that can be read: this control group's, or the machine's.

        Args:
            proc: where the kernel shows its processes.
            cgroups: where control groups are mounted.
        """
        self._file: Path | None = None
        self._before = 0
        for file in (*_group_files(proc, cgroups), proc / "vmstat"):
            count = _read(file)
            if count is not None:
                self._file, self._before = file, count
                return

    def since(self) -> int | None:
        """Processes killed since; None where no counter can be read."""
        count = None if self._file is None else _read(self._file)
        return None if count is None else max(0, count - self._before)


def _group_files(proc: Path, cgroups: Path) -> list[Path]:
    """Counters of this process' control group, version 2 first.

    In a container the paths of ``/proc/self/cgroup`` may be those outside of it; the group's own
    files then lie at the top.
    """
    try:
        lines = (proc / "self" / "cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    modern, old = [], []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            modern.append(cgroups / path.lstrip("/") / "memory.events")
            modern.append(cgroups / "unified" / path.lstrip("/") / "memory.events")
        elif "memory" in controllers.split(","):
            old.append(cgroups / "memory" / path.lstrip("/") / "memory.oom_control")
    return [
        *modern,
        cgroups / "memory.events",
        *old,
        cgroups / "memory" / "memory.oom_control",
    ]


def _read(file: Path) -> int | None:
    try:
        match = _COUNT.search(file.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return int(match[1]) if match else None
