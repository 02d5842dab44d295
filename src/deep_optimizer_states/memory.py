"""Is there enough host memory for the optimizer state? Asked before it is taken.

An allocation that does not fit does not fail on Linux: the process is killed minutes later, while
pages are touched. So the need is compared with what is free first, and said in a sentence.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import psutil

from deep_optimizer_states.errors import HostMemoryError

GIB = 2**30
STATE_BYTES = 12
"""Master weight and two moments in fp32, bytes a parameter; in 16 bits it is half of that."""
PROC_CGROUP = Path("/proc/self/cgroup")
CGROUP_ROOT = Path("/sys/fs/cgroup")
_V1_NAMES = ("memory.limit_in_bytes", "memory.usage_in_bytes")
HEADROOM = 0.97
"""Share of the free memory that may be taken."""


def free_host_bytes() -> int:
    """Host memory that can be had without swapping, in bytes; limits of control groups count."""
    left = [int(psutil.virtual_memory().available), *_left_in_groups()]
    return max(0, min(left))


def _left_in_groups() -> Iterator[int]:
    """What each control group above this process still allows: a container's, a batch job's.

    Pages of files that can be dropped are counted as used by the kernel, and as free here.
    """
    for folder, names in _memory_groups():
        limit, used = (_read_number(folder / name) for name in names)
        if limit is not None and used is not None:
            yield limit - used + _droppable(folder / "memory.stat")


def _memory_groups() -> Iterator[tuple[Path, tuple[str, str]]]:
    """Folders of this process's control groups and of their parents, in both versions."""
    for line in _read_text(PROC_CGROUP).splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root, names = CGROUP_ROOT, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            root, names = CGROUP_ROOT / "memory", _V1_NAMES
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", ".", "..")]
        for depth in range(len(parts) + 1):
            yield root.joinpath(*parts[:depth]), names


def _droppable(stat: Path) -> int:
    found = dict(line.split(maxsplit=1) for line in _read_text(stat).splitlines() if " " in line)
    value = found.get("total_inactive_file", found.get("inactive_file", "0"))
    return int(value) if value.isdigit() else 0


def check_host_memory(
    host_numel: int,
    buffer_bytes: int,
    free_bytes: int,
    num_ranks: int,
    state_bytes: int = STATE_BYTES,
) -> None:
    """Refuse state that does not fit.

    Args:
        host_numel: Elements of this rank whose state lives in host memory.
        buffer_bytes: Gradients and staging buffers of this rank beside it, in bytes.
        free_bytes: Free host memory before any rank took its share, in bytes.
        num_ranks: Ranks of this machine, which share it.
        state_bytes: Of master weight and moments, bytes a parameter.

    Raises:
        HostMemoryError: Says what is needed, what is free and what to do.
    """
    needed = (host_numel * state_bytes + buffer_bytes) * num_ranks
    if needed > free_bytes * HEADROOM:
        raise HostMemoryError(
            f"the optimizer state needs {needed / GIB:.1f} GiB of host memory "
            f"({host_numel:,} parameters x {state_bytes} bytes x {num_ranks} ranks of this "
            f"machine, and gradients); {free_bytes / GIB:.1f} GiB are free. Use more machines, a "
            'smaller model or, at stage 3, "deep_optimizer_states.ratio" below 1 to keep a share '
            "on the device. If this machine has more than it shows (the memory of some virtual "
            "machines grows as it is used), give its bytes in "
            '"deep_optimizer_states.host_memory_bytes"'
        )


def local_ranks() -> int:
    """Ranks of this machine, as the launcher says (torchrun, deepspeed); 1 without a launcher."""
    said = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or "1"
    return max(1, int(said))


def _read_number(path: Path) -> int | None:
    text = _read_text(path).strip()
    return int(text) if text.isdigit() else None


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
