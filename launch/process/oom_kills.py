"""Counts what the kernel's out-of-memory killer has killed: the evidence behind ``oom-host``."""

from __future__ import annotations

import re
from pathlib import Path

_COUNT = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)
_GROUP = re.compile(r"^\d+:([^:]*):/?(.*)$", re.MULTILINE)


class OomKills:
    """Kills since this object was made."""

    def __init__(self, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> None:
        """Choose the nearest counter that can be read: this control group's, or the machine's.

        Args:
            proc: where the kernel shows its processes.
            cgroups: where control groups are mounted.
        """
        files = (*_group_files(_text(proc / "self" / "cgroup"), cgroups), proc / "vmstat")
        self._file = next((file for file in files if _count(file) is not None), None)
        self._before = self._now() or 0

    def since(self) -> int | None:
        """Processes killed since; None where no counter can be read."""
        count = self._now()
        return None if count is None else max(0, count - self._before)

    def _now(self) -> int | None:
        return None if self._file is None else _count(self._file)


def _group_files(text: str, cgroups: Path) -> list[Path]:
    """Counters of this process' control group, version 2 first.

    In a container the paths of ``/proc/self/cgroup`` may be those outside of it; the group's own
    files then lie at the top.
    """
    groups = _GROUP.findall(text)
    modern = [path for controllers, path in groups if not controllers]
    old = [path for controllers, path in groups if "memory" in controllers.split(",")]
    return [
        *(cgroups / top / path / "memory.events" for path in modern for top in ("", "unified")),
        cgroups / "memory.events",
        *(cgroups / "memory" / path / "memory.oom_control" for path in (*old, "")),
    ]


def _count(file: Path) -> int | None:
    match = _COUNT.search(_text(file))
    return int(match[1]) if match else None


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
