"""Which cores the CPU lane runs on: this rank's share of the physical cores next to its GPU.

Adam on the host is bound by memory: a second thread on a core's other half brings nothing, and
memory behind another socket is slow. Launchers do not see to it: torchrun sets ``OMP_NUM_THREADS``
to 1 where a machine has several ranks.

A virtual machine shows whatever halves of cores its owner configured, and each may well be a core.
There the lane runs on all of them: a thread too many costs little where they are halves, but a
thread too few leaves a core idle where they are not.
"""

from __future__ import annotations

import functools
import math
import os
import socket
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

SPARE_FROM = 8
"""From this share on one core is left to the thread that launches the model's own work."""
_OWN_BINDING = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
_SYSFS = Path("/sys")
_QUOTA = Path("fs/cgroup/cpu.max")
_CPUINFO = Path("/proc/cpuinfo")
_Core = TypeVar("_Core")


@dataclass(frozen=True)
class Place:
    """Where a rank runs.

    Attributes:
        host: Name of its machine.
        rank: Its rank, which orders those of a machine.
        cores: The logical CPUs that the lane may use of each core, in ascending order: one, or on
            a virtual machine all that the core has.
    """

    host: str
    rank: int
    cores: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class LaneCores:
    """What the CPU lane gets.

    Attributes:
        num_threads: Threads of the kernel.
        cores: Logical CPUs that they may run on; empty: wherever the system puts them.
    """

    num_threads: int
    cores: tuple[int, ...]

    def __str__(self) -> str:
        where = f"on cores {_shown(self.cores)}" if self.cores else "not bound to cores"
        return f"{self.num_threads} threads {where}"

    def bind_this_thread(self) -> None:
        """Keep the calling thread, and the threads that it starts, on the cores.

        No result depends on it: where a sandbox forbids it, a warning says so once.
        """
        if self.cores:
            try:
                os.sched_setaffinity(0, self.cores)
            except OSError as error:
                _warn_not_bound(str(error))


ANYWHERE = LaneCores(1, ())
"""No core is nearer than another."""


@functools.cache
def _warn_not_bound(reason: str) -> None:
    warnings.warn(
        f"threads of the CPU lane could not be kept on their cores ({reason}), and run wherever "
        'the system puts them; "deep_optimizer_states.bind_cores": false does not try',
        stacklevel=3,
    )


def find_place(rank: int, pci_address: str | None, sysfs: Path = _SYSFS) -> Place:
    """Where the calling process runs.

    Args:
        rank: Its rank.
        pci_address: Of its GPU, such as ``0000:3b:00.0``; None without one.
        sysfs: Where the system describes itself.
    """
    allowed = os.sched_getaffinity(0)
    cpus = sysfs / "devices/system/cpu"
    most = None if _is_virtual_machine() else 1
    cores = set()
    for cpu in allowed:
        siblings = read_cpu_list(cpus / f"cpu{cpu}/topology/thread_siblings_list") & allowed
        cores.add(tuple(sorted(siblings or {cpu})[:most]))
    near: set[int] = set()
    if pci_address is not None:
        near = read_cpu_list(sysfs / "bus/pci/devices" / pci_address / "local_cpulist")
    # A launcher may have put the process elsewhere on purpose.
    chosen = {core for core in cores if core[0] in near} or cores
    return Place(socket.gethostname(), rank, tuple(sorted(chosen)))


def cpu_facts(name: str) -> str:
    """What the kernel says of the first CPU under ``name``; empty where it says nothing."""
    try:
        lines = _CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    pairs = (line.partition(":") for line in lines)
    return next((value.strip() for key, _, value in pairs if key.strip() == name), "")


def _is_virtual_machine() -> bool:
    """Whether this CPU says that a hypervisor is below; without such a flag it is taken as real."""
    return "hypervisor" in cpu_facts("flags").split()


def choose_cores(
    mine: Place, everyone: Iterable[Place], num_threads: int = 0, bind: bool = True
) -> LaneCores:
    """Deal a machine's cores out among the ranks that may use the same ones.

    Args:
        mine: The calling rank's place, one of ``everyone``.
        everyone: Places of all ranks.
        num_threads: Threads asked for; 0: ``OMP_NUM_THREADS`` where that is above 1 (1 is what
            launchers set by themselves), and else one for each logical CPU of the share.
        bind: Whether to keep the threads on the share; not done where the environment already says
            how OpenMP binds its threads.
    """
    neighbours = [place for place in everyone if place.host == mine.host]
    peers = sorted(place.rank for place in neighbours if place.cores == mine.cores)
    share = deal(mine.cores, peers.index(mine.rank), len(peers))
    if len(share) >= SPARE_FROM:
        share = share[1:]
    cpus = tuple(sorted(cpu for core in share for cpu in core))
    asked = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    threads = num_threads or (int(asked) if asked.isdigit() and int(asked) > 1 else 0)
    if not threads:
        # A container may see all cores and yet have the time of a few.
        threads = max(1, min(len(cpus), usable_cores() // len(neighbours)))
    bind = bind and not any(name in os.environ for name in _OWN_BINDING)
    return LaneCores(threads, cpus if bind else ())


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


def deal(cores: Sequence[_Core], position: int, num_ranks: int) -> tuple[_Core, ...]:
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
