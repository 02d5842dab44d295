"""Piece ``memory``: touch host memory, so that a machine whose memory grows with use shows it.

``python -m benchmarks.gpu_check.memory GIB``. Such a machine reports little free memory until more
is used; what asks before it takes memory refuses there. Everything is given back at the end.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

GIB = 2**30
_KEPT_FREE_GIB = 6
_AT_ONCE = 4


def gib_of(name: str) -> float:
    """A figure of ``/proc/meminfo`` in GiB."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) / 2**20
    raise KeyError(name)


def _take(_: int) -> mmap.mmap:
    pages = mmap.mmap(-1, GIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_HUGEPAGE)
    # Not page by page in Python, where threads would take turns.
    ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(pages)), 0, GIB)
    return pages


def main(argv: Sequence[str]) -> int:
    """Touch as many GiB as the first argument says, or as are free."""
    # If memory runs out, this process is to go and none of the user's others.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    before = gib_of("MemTotal")
    held: list[mmap.mmap] = []
    with ThreadPoolExecutor(min(_AT_ONCE, os.cpu_count() or 1)) as pool:
        while len(held) < int(argv[0]) and gib_of("MemAvailable") > _KEPT_FREE_GIB:
            held += pool.map(_take, range(min(_AT_ONCE, int(argv[0]) - len(held))))
    after = gib_of("MemTotal")
    sys.stdout.write(f"* touched {len(held)} GiB; the machine had {before:.1f}, has {after:.1f}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
