"""Which cores the CPU lane runs on: this rank's share of the physical cores next to its GPU.

Adam on the host is bound by memory: a second thread on a core's other half brings nothing, and
memory behind another socket is slow. Launchers do not see to it: torchrun sets ``OMP_NUM_THREADS``
to 1 where a machine has several ranks.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

SPARE_FROM = 8
"""From this share on one core is left to the thread that launches the model's own work."""
_OWN_BINDING = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
_SYSFS = Path("/sys")
_QUOTA = Path("fs/cgroup/cpu.max")


@dataclass(frozen=True)
class Place:
    """Where a rank runs.

    Attributes:
        host: Name of its machine.
        rank: Its rank, which orders those of a machine.
        cores: One logical CPU for each physical core that it may use, ascending.
    """

    host: str
    rank: int
    cores: tuple[int, ...]


@dataclass(frozen=True)
class LaneCores:
    """What the CPU lane gets.

    Attributes:
        num_threads: Threads of the kernel.
        cores: Cores that they may run on; empty: wherever the system puts them.
    """

    num_threads: int
    cores: tuple[int, ...]

    def __str__(self) -> str:
        where = f"on cores {_shown(self.cores)}" if self.cores else "not bound to cores"
        return f"{self.num_threads} threads {where}"

    def bind_this_thread(self) -> None:
        """Keep the calling thread, and the threads that it starts, on the cores."""
        if self.cores:
            os.sched_setaffinity(0, self.cores)

    @contextlib.contextmanager
    def hold_this_thread(self) -> Iterator[None]:
        """Keep the calling thread on the cores for a while.

        Linux gives a page from the memory next to the core that first touches it. Nothing in here
        may start threads: they would stay.
        """
        before = os.sched_getaffinity(0)
        bound = False
        with contextlib.suppress(OSError):  # a sandbox may forbid it; then pages lie anywhere
            self.bind_this_thread()
            bound = bool(self.cores)
        try:
            yield
        finally:
            if bound:
                with contextlib.suppress(OSError):
                    os.sched_setaffinity(0, before)


ANYWHERE = LaneCores(1, ())
"""No core is nearer than another."""


def find_place(rank: int, pci_address: str | None, sysfs: Path = _SYSFS) -> Place:
    """Where the calling process runs.

    Args:
        rank: Its rank.
        pci_address: Of its GPU, such as ``0000:3b:00.0``; None without one.
        sysfs: Where the system describes itself.
    """
    allowed = os.sched_getaffinity(0)
    cpus = sysfs / "devices/system/cpu"
    physical = {
        min(read_cpu_list(cpus / f"cpu{cpu}/topology/thread_siblings_list") & allowed, default=cpu)
        for cpu in allowed
    }
    near: set[int] = set()
    if pci_address is not None:
        near = read_cpu_list(sysfs / "bus/pci/devices" / pci_address / "local_cpulist")
    # A launcher may have put the process elsewhere on purpose.
    return Place(socket.gethostname(), rank, tuple(sorted(physical & near or physical)))


def choose_cores(
    mine: Place, everyone: Iterable[Place], num_threads: int = 0, bind: bool = True
) -> LaneCores:
    """Deal a machine's cores out among the ranks that may use the same ones.

    Args:
        mine: The calling rank's place, one of ``everyone``.
        everyone: Places of all ranks.
        num_threads: Threads asked for; 0: ``OMP_NUM_THREADS`` where that is above 1 (1 is what
            launchers set by themselves), and else one for each core of the share.
        bind: Whether to keep the threads on the share; not done where the environment already says
            how OpenMP binds its threads.
    """
    neighbours = [place for place in everyone if place.host == mine.host]
    peers = sorted(place.rank for place in neighbours if place.cores == mine.cores)
    share = deal(mine.cores, peers.index(mine.rank), len(peers))
    if len(share) >= SPARE_FROM:
        share = share[1:]
    asked = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    threads = num_threads or (int(asked) if asked.isdigit() and int(asked) > 1 else 0)
    if not threads:
        # A container may see all cores and yet have the time of a few.
        threads = max(1, min(len(share), usable_cores() // len(neighbours)))
    bind = bind and not any(name in os.environ for name in _OWN_BINDING)
    return LaneCores(threads, share if bind else ())


def usable_cores(sysfs: Path = _SYSFS) -> int:
    """Cores this process may use: its affinity, cut by the container's quota of time."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = (sysfs / _QUOTA).read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return cores
    if quota == "max":
        return cores
    return max(1, min(cores, math.ceil(int(quota) / int(period))))


def deal(cores: Sequence[int], position: int, num_ranks: int) -> tuple[int, ...]:
    """One rank's neighbouring cores; ranks share a core only where there are more of them."""
    if num_ranks > len(cores):
        return (cores[position % len(cores)],)
    first, end = (len(cores) * at // num_ranks for at in (position, position + 1))
    return tuple(cores[first:end])


def read_cpu_list(path: Path) -> set[int]:
    """CPUs in the kernel's notation, such as ``0-3,8``; empty where it cannot be read."""
    try:
        pieces = path.read_text(encoding="ascii").strip().split(",")
        bounds = [piece.split("-") for piece in pieces if piece]
        return {cpu for ends in bounds for cpu in range(int(ends[0]), int(ends[-1]) + 1)}
    except (OSError, ValueError):
        return set()


def _shown(cores: Sequence[int]) -> str:
    """The kernel's notation."""
    pieces: list[list[int]] = []
    for core in cores:
        if pieces and core == pieces[-1][-1] + 1:
            pieces[-1][1:] = [core]
        else:
            pieces.append([core])
    return ",".join("-".join(map(str, piece)) for piece in pieces)
