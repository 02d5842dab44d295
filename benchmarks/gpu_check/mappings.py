"""Piece ``mappings``: what page-locked memory costs, by how it is mapped.

Taking it is most of a run's set-up. For each kind of mapping: bytes a second of registering and
unregistering, and of copies each way. Without a GPU ``mlock`` stands in for CUDA's registration.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

NUM_BYTES, SMALL_NUM_BYTES = 2**31, 2**26
_COPIES = 4
_HUGE = 2**21
"""Huge pages begin at multiples of this."""


@dataclass(frozen=True)
class Mapping:
    """One way to take memory.

    Attributes:
        name: In the summary.
        flags: Of ``mmap``.
        huge: Whether huge pages are asked for.
        touched: Whether threads write the pages before they are registered.
    """

    name: str
    flags: int
    huge: bool = False
    touched: bool = False


MAPPINGS = (
    Mapping("shared", mmap.MAP_SHARED),
    Mapping("private", mmap.MAP_PRIVATE),
    Mapping("private, huge pages", mmap.MAP_PRIVATE, huge=True),
    Mapping("private, huge pages, touched by threads", mmap.MAP_PRIVATE, huge=True, touched=True),
)


class Locks:
    """Page-locks memory: by CUDA where there is a GPU, else by the kernel."""

    def __init__(self, cuda: bool) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mlock.argtypes = libc.munlock.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self._libc = libc
        self._cudart = None
        if cuda:
            import torch

            torch.cuda.init()  # type: ignore[no-untyped-call, unused-ignore]
            self._cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call, unused-ignore]

    def lock(self, address: int, num_bytes: int) -> int:
        """Lock pages; returns a status, 0 for success."""
        if self._cudart is not None:
            return int(self._cudart.cudaHostRegister(address, num_bytes, 0))
        return int(self._libc.mlock(address, num_bytes))

    def unlock(self, address: int, num_bytes: int) -> None:
        """Undo :meth:`lock`."""
        if self._cudart is not None:
            self._cudart.cudaHostUnregister(address)
        else:
            self._libc.munlock(address, num_bytes)


def measure(mapping: Mapping, num_bytes: int, locks: Locks, cuda: bool) -> str:
    """Rates of one kind of mapping, as a line for a person.

    Args:
        mapping: Which.
        num_bytes: Of memory.
        locks: Page-lock it.
        cuda: Whether there is a GPU to copy to and from.
    """
    pages = mmap.mmap(-1, num_bytes + _HUGE, flags=mapping.flags | mmap.MAP_ANONYMOUS)
    if mapping.huge:
        pages.madvise(mmap.MADV_HUGEPAGE)
    chars = (ctypes.c_char * len(pages)).from_buffer(pages)
    start = -ctypes.addressof(chars) % _HUGE
    address = ctypes.addressof(chars) + start
    try:
        begin = time.perf_counter()
        if mapping.touched:
            _touch(address, num_bytes)
        status = locks.lock(address, num_bytes)
        told = [f"registered at {_rate(num_bytes, begin)} GB/s"]
        if status:
            return f"{mapping.name}: refused with status {status}"
        if cuda:
            told += _copies(address, num_bytes)
        begin = time.perf_counter()
        locks.unlock(address, num_bytes)
        told.append(f"unregistered at {_rate(num_bytes, begin)} GB/s")
        return f"{mapping.name}: {', '.join(told)}"
    finally:
        del chars
        pages.close()


def _touch(address: int, num_bytes: int) -> None:
    """Write every page from as many threads as there are cores; ctypes lets them run at once."""
    threads = len(os.sched_getaffinity(0))
    share = -(-num_bytes // threads // _HUGE) * _HUGE
    with ThreadPoolExecutor(threads) as pool:
        for first in range(0, num_bytes, share):
            pool.submit(ctypes.memset, address + first, 0, min(share, num_bytes - first))


def _copies(address: int, num_bytes: int) -> list[str]:
    import torch

    chars = (ctypes.c_char * num_bytes).from_address(address)
    host = torch.frombuffer(chars, dtype=torch.uint8)
    device = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")

    def rate(copy: Callable[[], object]) -> str:
        copy()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(_COPIES):
            copy()
        torch.cuda.synchronize()
        return _rate(_COPIES * num_bytes, begin)

    down = rate(lambda: device.copy_(host, non_blocking=True))
    up = rate(lambda: host.copy_(device, non_blocking=True))
    return [f"H2D {down} GB/s", f"D2H {up} GB/s"]


def _rate(num_bytes: int, begin: float) -> str:
    return f"{num_bytes / (time.perf_counter() - begin) / 1e9:.2f}"


def main() -> int:
    """Measure and print."""
    import torch

    cuda = torch.cuda.is_available()
    locks, num_bytes = Locks(cuda), NUM_BYTES if cuda else SMALL_NUM_BYTES
    how = "cudaHostRegister" if cuda else "mlock, without a GPU"
    sys.stdout.write(f"* {num_bytes / 2**20:.0f} MiB by {how}\n")
    for mapping in MAPPINGS:
        sys.stdout.write(f"* {measure(mapping, num_bytes, locks, cuda)}\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
