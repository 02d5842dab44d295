"""Series of small tiles through our host kernel, on the machine as it is and beside busy loops."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.host_passes import FusedPass
from benchmarks.timing import in_turns
from deep_optimizer_states.kernels.host import HostAdam, Tail
from deep_optimizer_states.kernels.tensors import AdamTensors

SERIES = ((256, 2**12), (64, 2**17), (16, 2**20))
"""Tiles, and elements of each."""
_BUSY_LOOP = """
import os, sys
parent, core = map(int, sys.argv[1:])
os.sched_setaffinity(0, [core])
print("started", flush=True)
while os.getppid() == parent: pass
"""


@contextlib.contextmanager
def busy_cores() -> Iterator[list[int]]:
    """Keep a busy loop on each usable core for a while; gives their process ids."""
    loops = []
    try:
        for core in sorted(os.sched_getaffinity(0)):
            command = [sys.executable, "-c", _BUSY_LOOP, str(os.getpid()), str(core)]
            loops.append(subprocess.Popen(command, stdout=subprocess.PIPE))
        for loop in loops:
            assert loop.stdout is not None
            loop.stdout.readline()
        yield [loop.pid for loop in loops]
    finally:
        for loop in loops:
            loop.kill()
            loop.communicate()


def tiles(repeats: int, num_threads: int) -> list[dict[str, Any]]:
    """Time each series three ways, as the machine is and then beside a busy loop on each core.

    Args:
        repeats: Turns that count.
        num_threads: Threads that the kernel may use.

    Returns:
        For each state of the machine and each series: milliseconds with one thread, with
        ``num_threads`` allowed, and for the probe with a team of ``num_threads`` for every tile.
    """
    found = []
    for cores in ("as they are", "taken"):
        with busy_cores() if cores == "taken" else contextlib.nullcontext():
            for count, numel in SERIES:
                times = in_turns(_series(count, numel, num_threads), repeats)
                taken = {name: time.scaled(1e3).as_json() for name, time in times.items()}
                found.append({"cores": cores, "tiles": count, "numel": numel, "ms": taken})
    return found


def _series(count: int, numel: int, num_threads: int) -> dict[str, Callable[[], None]]:
    adam, tail = HostAdam(0), Tail(16, 0)
    fp32 = (torch.zeros(count * numel) for _ in range(3))
    bf16 = (torch.ones(count * numel, dtype=torch.bfloat16) for _ in range(2))
    whole = AdamTensors(*fp32, *bf16)
    cut = [whole.narrow(tile * numel, numel) for tile in range(count)]
    one, allowed = ([FusedPass(adam, tail, tile, n) for tile in cut] for n in (1, num_threads))

    def run(method: Callable[[FusedPass], None], passes: list[FusedPass]) -> Callable[[], None]:
        def series() -> None:
            for tile in passes:
                method(tile)

        return series

    return {
        "one thread": run(FusedPass.step, one),
        "threads allowed": run(FusedPass.step, allowed),
        "probe, always a team": run(FusedPass.probe, allowed),
    }
