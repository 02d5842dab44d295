"""Rates of the host, by threads, all in one process and on one set of arrays.

Each turn runs every pass once, so that what else the machine does meets all of them alike.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from deep_optimizer_states.calibrate.watch import Say, Steps
from deep_optimizer_states.errors import KernelError
from deep_optimizer_states.kernels.host import HostAdam
from deep_optimizer_states.kernels.scalars import AdamScalars, BetaPowers, adam_scalars
from deep_optimizer_states.kernels.tensors import AdamTensors

NUMEL = 2**25
"""Elements of each array: 670 MB in all, beyond any cache."""
STREAM_BYTES = 28
"""Read and written a parameter by Adam in one pass with 16-bit gradients and weights."""
HOST_RATES = (
    "host_stream_bytes_per_s",
    "host_fused_parameters_per_s",
    "host_adam_parameters_per_s",
    "host_cast_parameters_per_s",
)
LR, BETAS, EPS, WEIGHT_DECAY = 1e-3, (0.9, 0.95), 1e-8, 0.1
_BYTES_A_PARAMETER = 20
_MOST_TURNS, _TURNS_S = 9, 1.5
_NOISE = 0.1
"""Share by which a rate differs from run to run."""
_OP_ID = -20242  # DeepSpeed numbers its optimizers from 0
Passes = dict[str, tuple[Callable[[int], object], float]]
"""Rate to what runs it with a number of threads, and to what it moves in a run."""


class HostArrays:
    """One subgroup's arrays, written by all threads so that its pages lie near all cores."""

    def __init__(self, numel: int) -> None:
        def filled(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(numel, dtype=dtype).fill_(value)

        half = torch.bfloat16
        state = (filled(0.5), filled(0.01), filled(1e-4))
        self.tensors = AdamTensors(*state, filled(0.01, half), filled(0.0, half))
        self.grad32 = filled(0.01)


def adam_settings() -> AdamScalars:
    """Scalars of a first step."""
    group = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": WEIGHT_DECAY}
    powers = BetaPowers(BETAS).at(1, BETAS)
    return adam_scalars({**group, "bias_correction": True}, powers, 1.0, decoupled=True)


def host_passes(arrays: HostArrays, lack: Callable[[str, Sequence[str], str], None]) -> Passes:
    """What can be run on this machine.

    Args:
        arrays: What the passes read and write.
        lack: Told what cannot be run, which rates it would give, and why.
    """
    tensors, numel = arrays.tensors, float(arrays.tensors.numel)
    passes: Passes = {}
    try:
        adam = HostAdam(tail_mode=1)
    except KernelError as error:
        lack("this engine's Adam", HOST_RATES[:2], str(error))
    else:
        settings = adam_settings()
        passes[HOST_RATES[0]] = (
            lambda threads: adam.probe(tensors, settings, threads),
            STREAM_BYTES * numel,
        )
        passes[HOST_RATES[1]] = (
            lambda threads: adam.step(tensors, settings, tensors.numel, threads),
            numel,
        )
    try:
        passes[HOST_RATES[2]] = (_stock_adam(arrays), numel)
    except Exception as error:  # noqa: BLE001 - DeepSpeed's builder raises whatever its tools do
        lack("DeepSpeed's Adam", HOST_RATES[2:3], f"cpu_adam cannot be built: {error}")
    passes[HOST_RATES[3]] = (lambda threads: tensors.weights.copy_(tensors.master), numel)
    return passes


def _stock_adam(arrays: HostArrays) -> Callable[[int], object]:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        from deepspeed.ops.op_builder import CPUAdamBuilder

        op: Any = CPUAdamBuilder().load()
    settings = (LR, *BETAS, EPS, WEIGHT_DECAY)
    op.create_adam(_OP_ID, *settings, True, False)
    master, *moments = arrays.tensors.state
    state = (master, arrays.grad32, *moments)
    return lambda threads: op.adam_update(_OP_ID, 1, *settings, True, *state)


def host_rates(
    passes: Mapping[str, tuple[Callable[[int], object], float]],
    thread_counts: Sequence[int],
    say: Say,
    steps: Steps,
) -> dict[str, list[tuple[int, float]]]:
    """Rates of the passes by threads."""
    curves: dict[str, list[tuple[int, float]]] = {name: [] for name in passes}
    for threads in thread_counts:
        set_threads(threads)
        with steps.step(f"the host with {threads} thread(s)"):
            taken = _turns({name: _bound(work, threads) for name, (work, _) in passes.items()})
        for name, (_, amount) in passes.items():
            curves[name].append((threads, amount / median(taken[name])))
        shown = (f"{name.split('_')[1]} {curves[name][-1][1] / 1e9:.3g}" for name in passes)
        say(f"  {threads} thread(s): {', '.join(shown)} G/s")
    for name, curve in curves.items():
        for line in _slower_with_more(name, curve):
            say(line)
    return curves


def _slower_with_more(name: str, curve: Sequence[tuple[int, float]]) -> list[str]:
    """What to say of numbers of threads that did clearly worse than fewer of them."""
    lines = []
    best_threads, best_rate = curve[0]
    for threads, rate in curve[1:]:
        if rate < (1 - _NOISE) * best_rate:
            lines.append(
                f"  warning: {name}: {threads} threads gave {rate / 1e9:.3g} G/s, {best_threads} "
                f"gave {best_rate / 1e9:.3g}: was something else running? Then measure again"
            )
        if rate > best_rate:
            best_threads, best_rate = threads, rate
    return lines


def _bound(work: Callable[[int], object], threads: int) -> Callable[[], object]:
    return lambda: work(threads)


def _turns(passes: Mapping[str, Callable[[], object]]) -> dict[str, list[float]]:
    """Seconds of each pass: a turn to warm up, then three at least."""
    taken: dict[str, list[float]] = {name: [] for name in passes}
    begin = 0.0
    for turn in range(_MOST_TURNS + 1):
        if turn == 1:
            begin = time.perf_counter()
        if turn > 3 and time.perf_counter() - begin > _TURNS_S:
            break
        for name, work in passes.items():
            start = time.perf_counter()
            work()
            if turn:
                taken[name].append(time.perf_counter() - start)
    return taken


def set_threads(threads: int) -> None:
    """Let torch, and every OpenMP runtime that its extensions brought along, use so many."""
    torch.set_num_threads(threads)
    for path in _openmp_runtimes(Path("/proc/self/maps").read_text(encoding="utf-8")):
        ctypes.CDLL(path).omp_set_num_threads(ctypes.c_int(threads))


def _openmp_runtimes(maps: str) -> list[str]:
    """Paths of the OpenMP runtimes in a process's memory map."""
    found = re.findall(r"(/\S*/lib(?:gomp|iomp5|omp)[-.][^/\n]*)$", maps, re.MULTILINE)
    return sorted(set(found))


def fitting_numel(free_bytes: int) -> int:
    """Elements of arrays that take a quarter of the free memory at most, a multiple of 16."""
    return min(NUMEL, free_bytes // (4 * _BYTES_A_PARAMETER) // 16 * 16)
