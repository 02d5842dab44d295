"""What to change, a sentence each with the figure behind it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Protocol

from deep_optimizer_states.predict.machine import Machine
from deep_optimizer_states.predict.memory.offload import HEADROOM, ahead_room_bytes, memory_of
from deep_optimizer_states.predict.memory.peaks import CONTEXT_BYTES, GIB
from deep_optimizer_states.predict.rank import rank_of
from deep_optimizer_states.predict.stock import STOCK
from deep_optimizer_states.predict.workload import STATE_BYTES, Workload

RATIOS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0)
SUBGROUPS = (10_000_000, 50_000_000, 100_000_000, 200_000_000, 500_000_000)
GAIN = 0.02
"""A change that gains less is not advised."""


class _Timed(Protocol):
    @property
    def iteration_s(self) -> float: ...


Predict = Callable[[Workload, Machine], _Timed]


def advise(workload: Workload, machine: Machine, total_s: float, predict: Predict) -> list[str]:
    """Advice for one workload.

    Args:
        workload: With its policy settled.
        machine: Where it runs.
        total_s: Its iteration.
        predict: Predicts a variant of it.
    """
    found = [
        _engine(workload, machine, total_s, predict),
        _ratio(workload, machine, total_s, predict),
        _subgroups(workload, machine, total_s, predict),
        _prefetch(workload, machine),
        _pinned(workload, machine),
        _threads(workload, machine),
    ]
    return [sentence for sentence in found if sentence]


def _engine(workload: Workload, machine: Machine, total_s: float, predict: Predict) -> str:
    if workload.software is None:
        own = dataclasses.replace(workload, step_before_norm=False, prefetch_memory_bytes=0)
        stock = predict(dataclasses.replace(own, software=STOCK), machine).iteration_s
        return (
            f"engine: stock DeepSpeed would take {stock:.3f} s an iteration, {stock / total_s:.2f} "
            "times as long"
        )
    ours = predict(dataclasses.replace(workload, software=None, policy="auto"), machine).iteration_s
    return f"engine: 'ours' would take {ours:.3f} s an iteration, {total_s / ours:.2f} times faster"


def _ratio(workload: Workload, machine: Machine, total_s: float, predict: Predict) -> str:
    """The smallest share in host memory that the device has room for, if it pays."""
    if not machine.gpus:
        return ""
    assert machine.device_memory_bytes is not None
    room = machine.device_memory_bytes * HEADROOM - CONTEXT_BYTES
    used = memory_of(workload, machine, workload.policy).device_bytes
    smaller = [ratio for ratio in RATIOS if ratio < workload.offload_ratio]
    best, best_s, best_bytes = workload.offload_ratio, total_s, used
    for ratio in smaller:
        other = dataclasses.replace(workload, offload_ratio=ratio)
        need = memory_of(other, machine, workload.policy).device_bytes
        if need > room:
            break
        seconds = predict(other, machine).iteration_s
        if seconds < best_s:
            best, best_s, best_bytes = ratio, seconds, need
    if best_s < total_s * (1 - GAIN):
        return (
            f"ratio: {best:g} keeps {100 * (1 - best):.0f}% of the optimizer state on the GPU "
            f"({best_bytes / GIB:.1f} of {room / GIB:.1f} GiB) and takes {best_s:.3f} s an "
            f"iteration, {total_s / best_s:.2f} times faster"
        )
    return (
        f"ratio: stay at {workload.offload_ratio:g}; no lower one that fits into the GPU's free "
        f"{max(0.0, room - used) / GIB:.1f} GiB gains {100 * GAIN:.0f}%"
    )


def _subgroups(workload: Workload, machine: Machine, total_s: float, predict: Predict) -> str:
    timed = [
        (predict(dataclasses.replace(workload, subgroup_numel=numel), machine).iteration_s, numel)
        for numel in SUBGROUPS
    ]
    seconds, numel = min(timed)
    if workload.subgroup_numels or seconds >= total_s * (1 - GAIN):
        spread = max(timed)[0] / seconds - 1
        return (
            f"subgroup size: {workload.subgroup_numel:,} is good; from {SUBGROUPS[0]:,} to "
            f"{SUBGROUPS[-1]:,} iterations differ by {100 * spread:.1f}%"
        )
    return (
        f"subgroup size: {numel:,} takes {seconds:.3f} s an iteration, {total_s / seconds:.2f} "
        f"times faster than {workload.subgroup_numel:,}"
    )


def _prefetch(workload: Workload, machine: Machine) -> str:
    """Whether a limit given in bytes is more than there is: memory that training needs."""
    limit = workload.prefetch_memory_bytes
    room = sum(ahead_room_bytes(workload, machine, workload.policy))
    if not isinstance(limit, int) or limit <= room:
        return ""
    return (
        f"prefetch memory: {limit / GIB:.1f} GiB are more than the {room / GIB:.1f} GiB that are "
        'free at the end of backward, and training may run out of memory: take "auto", or less'
    )


def _pinned(workload: Workload, machine: Machine) -> str:
    if not machine.gpus:
        return ""
    rates, memory = machine.rates, memory_of(workload, machine, workload.policy)
    locked = memory.page_locked_bytes
    words = f"pinned memory: lock {locked / GIB:.1f} GiB a rank"
    pageable, pinned = rates.pageable_d2h_bytes_per_s, rates.d2h_bytes_per_s
    if pageable is not None and pinned is not None:
        words += (
            f"; page-locked copies run at {pinned / 1e9:.0f} GB/s, others at {pageable / 1e9:.1f}"
        )
    if rates.page_lock_bytes_per_s is not None:
        words += f"; locking takes {locked / rates.page_lock_bytes_per_s:.0f} s once"
    return words


def _threads(workload: Workload, machine: Machine) -> str:
    rank = rank_of(workload, machine)
    threads = max(1, int(rank.threads))
    name = "host_adam_parameters_per_s" if workload.software else "host_fused_parameters_per_s"
    full = machine.curve(name, threads) / 1e9
    one = machine.curve(name, 1) / 1e9
    moved = STATE_BYTES * 2 * sum(workload.subgroups) / rank.host_bytes_per_s
    if threads == 1:
        return (
            f"threads: a rank has one core, so OMP_NUM_THREADS=1; the host updates {one:.2f}e9 "
            f"parameters/s, and host memory alone bounds a rank's update to {moved:.3f} s"
        )
    return (
        f"threads: OMP_NUM_THREADS={threads} a rank, bound to the cores of its own socket "
        f"(--bind_cores_to_rank); with one thread the host updates {one:.2f}e9 parameters/s, with "
        f"{threads} {full:.2f}e9, and host memory alone bounds a rank's update to {moved:.3f} s"
    )
