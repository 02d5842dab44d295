"""Is there enough host memory for the optimizer state? Asked before it is taken.

An allocation that does not fit does not fail on Linux: the process is killed minutes later, while
pages are touched. So the need is compared with what is free first, and said in a sentence.
"""

from __future__ import annotations

import os
import resource
from pathlib import Path

import psutil

from deep_optimizer_states.errors import HostMemoryError

GIB = 2**30
STATE_BYTES = 12
"""Master weight and two moments in fp32, bytes a parameter."""
HEADROOM = 0.97
"""Share of the free memory that may be taken."""


def free_host_bytes() -> int:
    """Host memory that can be had without swapping, in bytes; a container's limit counts."""
    free = int(psutil.virtual_memory().available)
    limit = _read_number("/sys/fs/cgroup/memory.max")
    used = _read_number("/sys/fs/cgroup/memory.current")
    if limit is not None and used is not None:
        free = min(free, max(0, limit - used))
    return free


def check_host_memory(host_numel: int, staging_bytes: int, free_bytes: int, num_ranks: int) -> None:
    """Refuse state that does not fit.

    Args:
        host_numel: Elements of this rank whose state lives in host memory.
        staging_bytes: Buffers beside it, in bytes.
        free_bytes: Free host memory before any rank took its share.
        num_ranks: Ranks of this machine, which share it.

    Raises:
        HostMemoryError: Says what is needed, what is free and what to do.
    """
    needed = (host_numel * STATE_BYTES + staging_bytes) * num_ranks
    if needed > free_bytes * HEADROOM:
        raise HostMemoryError(
            f"the optimizer state needs {needed / GIB:.1f} GiB of host memory "
            f"({host_numel:,} parameters x {STATE_BYTES} bytes x {num_ranks} ranks of this "
            f"machine, and buffers); {free_bytes / GIB:.1f} GiB are free. Use more machines, a "
            'smaller model, or "deep_optimizer_states.ratio" below 1 to keep a share on the device'
        )


def lock_limit_bytes() -> int | None:
    """What a process may lock (``ulimit -l``), in bytes; None without a limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def explain_lock_limit(num_bytes: int, limit_bytes: int | None) -> str | None:
    """A warning when state of ``num_bytes`` may not be page-locked; None when it may."""
    if limit_bytes is None or num_bytes <= limit_bytes:
        return None
    return (
        f"`ulimit -l` lets a process lock {limit_bytes / GIB:.1f} GiB and this rank's optimizer "
        f"state has {num_bytes / GIB:.1f} GiB; what cannot be locked is kept pageable, and its "
        "copies will not overlap with anything. Raise the limit (ulimit -l unlimited)"
    )


def local_ranks() -> int:
    """Ranks of this machine, as the launcher says; 1 without a launcher."""
    return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _read_number(path: str) -> int | None:
    try:
        text = Path(path).read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
