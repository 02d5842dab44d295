"""This machine: the cores that the CPU lane runs on, and the host memory that is free.

The lane gets this rank's share of the physical cores next to its GPU. Adam on the host is bound by
memory: a second thread on a core's other half brings nothing, and memory behind another socket is
slow. Launchers do not see to it: torchrun sets ``OMP_NUM_THREADS`` to 1 where a machine has several
ranks. A virtual machine shows whatever halves of cores its owner configured, and each may well be a
core. There the lane runs on all of them: a thread too many costs little where they are halves, but
a thread too few leaves a core idle where they are not.

An allocation that does not fit does not fail on Linux: the process is killed minutes later, while
pages are touched. So the need is compared with what is free first, and said in a sentence.
"""

from __future__ import annotations

import functools
import math
import os
import re
import socket
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import psutil

from deep_optimizer_states.errors import HostMemoryError
from deep_optimizer_states.units import GIB

SPARE_FROM = 8
"""From this share on one core is left to the thread that launches the model's own work."""
_OWN_BINDING = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
_SYSFS = Path("/sys")
_QUOTA = Path("fs/cgroup/cpu.max")
CPUINFO = Path("/proc/cpuinfo")
_Core = TypeVar("_Core")


@dataclass(frozen=True)
class Place:
    """The cores that a rank may run on.

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
    """Threads and cores of the CPU lane.

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
        "the system puts them; OMP_PROC_BIND=false in the environment does not try",
        stacklevel=3,
    )


def find_place(rank: int, pci_address: str | None, sysfs: Path = _SYSFS) -> Place:
    """Find the cores of the calling process.

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
    """Return what the kernel says of the first CPU under ``name``; empty for nothing."""
    try:
        lines = CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    pairs = (line.partition(":") for line in lines)
    return next((value.strip() for key, _, value in pairs if key.strip() == name), "")


def _is_virtual_machine() -> bool:
    return "hypervisor" in cpu_facts("flags").split()


def choose_cores(mine: Place, everyone: Iterable[Place]) -> LaneCores:
    """Deal a machine's cores out among the ranks that may use the same ones.

    There are ``OMP_NUM_THREADS`` threads where that is above 1 (1 is what launchers set by
    themselves), and else one for each logical CPU of the share. They are kept on the share unless
    the environment already says how OpenMP binds its threads.

    Args:
        mine: The calling rank's place, one of ``everyone``.
        everyone: Places of all ranks.
    """
    neighbours = [place for place in everyone if place.host == mine.host]
    peers = sorted(place.rank for place in neighbours if place.cores == mine.cores)
    share = deal(mine.cores, peers.index(mine.rank), len(peers))
    if len(share) >= SPARE_FROM:
        share = share[1:]
    cpus = tuple(sorted(cpu for core in share for cpu in core))
    asked = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    if asked.isdigit() and int(asked) > 1:
        threads = int(asked)
    else:
        # A container may see all cores and yet have the time of a few.
        threads = max(1, min(len(cpus), usable_cores() // len(neighbours)))
    is_bound_already = any(name in os.environ for name in _OWN_BINDING)
    return LaneCores(threads, () if is_bound_already else cpus)


def usable_cores(sysfs: Path = _SYSFS) -> int:
    """Return the number of cores this process may use: its affinity, cut by its quota of time."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = (sysfs / _QUOTA).read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return cores
    if quota == "max":
        return cores
    return max(1, min(cores, math.ceil(int(quota) / int(period))))


def deal(cores: Sequence[_Core], position: int, num_ranks: int) -> tuple[_Core, ...]:
    """Return one rank's neighbouring cores; ranks share a core only where they outnumber them."""
    if num_ranks > len(cores):
        return (cores[position % len(cores)],)
    first, end = (len(cores) * at // num_ranks for at in (position, position + 1))
    return tuple(cores[first:end])


def read_cpu_list(path: Path) -> set[int]:
    """Read CPUs in the kernel's notation, such as ``0-3,8``; empty where that fails."""
    try:
        pieces = path.read_text(encoding="ascii").strip().split(",")
        bounds = [piece.split("-") for piece in pieces if piece]
        return {cpu for ends in bounds for cpu in range(int(ends[0]), int(ends[-1]) + 1)}
    except (OSError, ValueError):
        return set()


def _shown(cores: Sequence[int]) -> str:
    """Return cores in the kernel's notation."""
    pieces: list[list[int]] = []
    for core in cores:
        if pieces and core == pieces[-1][-1] + 1:
            pieces[-1][1:] = [core]
        else:
            pieces.append([core])
    return ",".join("-".join(map(str, piece)) for piece in pieces)


PROC_CGROUP = Path("/proc/self/cgroup")
PROC_STATUS = Path("/proc/self/status")
_STATUS_LINE = re.compile(r"^(\w+):\s*(\d+) kB$", re.MULTILINE)
CGROUP_ROOT = Path("/sys/fs/cgroup")
_V1_NAMES = ("memory.limit_in_bytes", "memory.usage_in_bytes")
HEADROOM = 0.97
"""Share of the free memory that may be taken."""
DEVICE_MARGIN = 0.1
"""Share of a device's memory that is left alone: what is cut up too small, and what varies."""


def free_host_bytes() -> int:
    """Return the host memory to be had without swapping, within limits of control groups."""
    left = [int(psutil.virtual_memory().available), *_left_in_groups()]
    return max(0, min(left))


def spare_host_bytes() -> int:
    """Return this rank's share of free host memory, less what it had at its peak and has freed.

    Training takes that again. Ranks of this machine are taken to be alike.
    """
    status = dict(_STATUS_LINE.findall(_read_text(PROC_STATUS)))
    freed = (int(status.get("VmHWM", 0)) - int(status.get("VmRSS", 0))) * 1024
    return max(0, free_host_bytes() // local_ranks() - freed)


def _left_in_groups() -> Iterator[int]:
    """Yield what each control group above this process still allows.

    Pages of files that can be dropped are counted as used by the kernel, and as free here.
    """
    for folder, names in _memory_groups():
        limit, used = (_read_number(folder / name) for name in names)
        if limit is not None and used is not None:
            yield limit - used + _droppable(folder / "memory.stat")


def _memory_groups() -> Iterator[tuple[Path, tuple[str, str]]]:
    """Yield folders of this process's control groups and of their parents, in both versions."""
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


def bytes_of_state(master_bytes: int = 4, moment_bytes: int = 4) -> int:
    """Return the host memory of a master weight and both moments, bytes a parameter.

    Args:
        master_bytes: Of a master weight; 4 is fp32.
        moment_bytes: Of one moment.
    """
    return master_bytes + 2 * moment_bytes


def bytes_of_gradients(each_bytes: int = 2, accumulation: int = 1) -> int:
    """Return the host memory of gradients beside the state at stage 3, bytes a parameter.

    Args:
        each_bytes: Bytes of one number in the accumulation type.
        accumulation: Micro-batches of a window. Of more than one, the sum so far lies beside the
            gradient that the last update went by.
    """
    return each_bytes * (2 if accumulation > 1 else 1)


@dataclass(frozen=True)
class HostRoom:
    """Host memory that the ranks of a machine, which are taken to be alike, may give to state.

    Attributes:
        free_bytes: Free before any rank took its share, in bytes.
        num_ranks: Ranks of the machine.
        state_bytes: Of master weight and moments, bytes a parameter.
    """

    free_bytes: int
    num_ranks: int
    state_bytes: int = bytes_of_state()

    def has(self, needed_bytes: float) -> bool:
        """Return whether every rank can take so many bytes."""
        return needed_bytes * self.num_ranks <= self.free_bytes * HEADROOM

    def check(self, host_numel: int, buffer_bytes: int, remedy: str) -> None:
        """Refuse state that does not fit.

        Args:
            host_numel: Elements of this rank whose state lives in host memory.
            buffer_bytes: Gradients and staging buffers of this rank beside it, in bytes.
            remedy: What helps beside more machines and a smaller model.

        Raises:
            HostMemoryError: Says what is needed, what is free and what to do.
        """
        needed = host_numel * self.state_bytes + buffer_bytes
        if self.has(needed):
            return
        raise HostMemoryError(
            f"the optimizer state needs {needed * self.num_ranks / GIB:.1f} GiB of host memory "
            f"({host_numel:,} parameters x {self.state_bytes} bytes x {self.num_ranks} ranks of "
            f"this machine, and gradients); {self.free_bytes / GIB:.1f} GiB are free. Use more "
            f"machines, a smaller model or {remedy}. If this machine has more than it shows (the "
            "memory of some virtual machines grows as it is used), give its bytes in "
            '"deep_optimizer_states.host_memory_bytes"'
        )

    def largest_share(self, numels: Sequence[int], buffer_bytes: int) -> float:
        """Return the share of state that fits, from 0 to 1: all but as few leading subgroups.

        Args:
            numels: Elements of each subgroup of this rank.
            buffer_bytes: As in :meth:`check`.
        """
        total = held = sum(numels)
        for numel in numels:
            if self.has(held * self.state_bytes + buffer_bytes):
                break
            held -= numel
        return held / total if total else 1.0


def local_ranks() -> int:
    """Return the ranks of this machine, as the launcher says; 1 without a launcher."""
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
