"""The paper's software as the performance model needs it: the authors' fork of DeepSpeed 0.13.

It has three modes: the baseline (ZeRO-3 with its optimizer offloaded), the same with gradients
flushed behind backward, and the hybrid update with one subgroup in ``stride`` on the GPU.

[Note: one slot] The hybrid update has one device slot: the next prefetch begins after the last
flush. Its host thread waits for the prefetch, copies the fp32 gradient to the device and only then
goes on. Published update times by stride are reproduced by this order and by no freer one.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from deep_optimizer_states.plan import DEVICE_CHAIN, HOST_CHAIN, RESIDENT_CHAIN, Action, Kind
from deep_optimizer_states.predict.machine import Costs, Machine
from deep_optimizer_states.predict.stock import StockSimulator
from deep_optimizer_states.predict.update_sim import State, UpdateSimulator
from deep_optimizer_states.predict.workload import (
    FP32_BYTES,
    STATE_BYTES,
    StockOffload,
    Workload,
    WorkloadError,
    power_of_two,
)


@dataclass(frozen=True)
class Fork(StockOffload):
    """The fork without its hybrid update, which differs from today's DeepSpeed in four ways."""

    flush_bytes: int = FP32_BYTES

    def resident_subgroups(self, workload: Workload) -> frozenset[int]:
        """Subgroups whose state stays on the device (TwinFlow): the last ones."""
        count = len(workload.subgroups)
        return frozenset(range(int(workload.offload_ratio * count), count))

    def copy_bytes_per_s(self, machine: Machine) -> float:
        """The fork did not page-lock master weights."""
        return machine.rates.pageable_h2d_bytes_per_s or super().copy_bytes_per_s(machine)

    def host_state_bytes(self, numels: Sequence[int]) -> tuple[float, float]:
        """Each part of the state is allocated, and rounded up, by itself."""
        rounded = sum(power_of_two(FP32_BYTES * numel) for numel in numels)
        return 3 * rounded, float(FP32_BYTES * sum(numels))


class HybridSimulator(StockSimulator):
    """See [Note: one slot]; nothing waits for the last flush, which may be lost."""

    slots = 1
    waits_for_flushes = False

    def prefetched_bytes(self, tile: int) -> int:
        """The gradient is copied later, by the host's thread."""
        return STATE_BYTES

    def device_step(self, tile: int, numel: int, state: State) -> None:
        """Copy the fp32 gradient of a tile that is not resident, then step it."""
        slot = state.held.get(tile)
        if slot is not None:
            assert slot.filled is not None, tile
            state.lanes.run_until(slot.filled)
            self.block(f"gradient {tile}", numel, self.rank.h2d_bytes_per_s, state)
        super().device_step(tile, numel, state)

    weights = UpdateSimulator.weights  # 16-bit weights, which the host does not wait for


@dataclass(frozen=True)
class Hybrid(Fork):
    """One subgroup in ``stride`` on the GPU, through one slot."""

    def check(self, workload: Workload) -> None:
        """Refuse a stride of 1, which the fork cannot do.

        Raises:
            WorkloadError: The stride is 1.
        """
        if workload.stride < 2:
            raise WorkloadError("stride = 1: the paper's software needs at least 2")

    def describe(self, workload: Workload, machine: Machine) -> str:
        """Who updates what, in words."""
        where = "on the GPU" if machine.gpus else "in the device's place, in host memory"
        return f"one subgroup in {workload.stride} {where}, through one slot"

    def slot_numel(self, workload: Workload) -> int:
        """A whole subgroup."""
        return max(workload.subgroups, default=0)

    def host_state_bytes(self, numels: Sequence[int]) -> tuple[float, float]:
        """One more page-locked copy of the master weights than the baseline has."""
        locked, pageable = super().host_state_bytes(numels)
        return locked + sum(power_of_two(FP32_BYTES * numel) for numel in numels), pageable

    def extra_s(self, costs: Costs) -> tuple[float, float]:
        """Its last copies run on into the forward, and it adds to what lies outside the phases."""
        return costs.hybrid_forward_s, costs.hybrid_s

    @property
    def all_resident(self) -> StockOffload:
        """At ratio 0 there is nothing to share out: the baseline stands for it."""
        return BASELINE

    def actions(self, workload: Workload) -> list[Action]:
        """The actions of an update, in the order in which the fork issues them."""
        resident = self.resident_subgroups(workload)
        rest = [idx for idx in range(len(workload.subgroups)) if idx not in resident]
        moved = [idx for idx in rest if (idx + 1) % workload.stride == 0]
        following = dict(itertools.pairwise(moved))
        found = [Action(idx, Kind.PREFETCH) for idx in moved[:1]]
        for idx in rest:
            chain = DEVICE_CHAIN[1:] if idx in moved else HOST_CHAIN
            found += [Action(idx, kind) for kind in chain]
            if idx in following:
                found.append(Action(following[idx], Kind.PREFETCH))
        return found + [Action(idx, kind) for idx in sorted(resident) for kind in RESIDENT_CHAIN]


BASELINE = Fork(
    StockSimulator,
    "zero3-0.13",
    "every subgroup on the CPU, gradients flushed one after the other",
    hides_flush=False,
)
ASYNC_GRADIENTS = Fork(
    StockSimulator, "async-0.13", "every subgroup on the CPU, gradients flushed behind backward"
)
HYBRID = Hybrid(HybridSimulator, "paper")


def paper_software_of(policy: str) -> Fork:
    """What the fork does where today's plugin has a policy.

    Args:
        policy: The plugin's; empty where it is not asked for.

    Raises:
        WorkloadError: The paper's software has no such policy.
    """
    modes = {"": BASELINE, "all-host": ASYNC_GRADIENTS, "ratio": ASYNC_GRADIENTS, "stride": HYBRID}
    if policy not in modes:
        raise WorkloadError(
            f"policy = {policy!r}: the paper's software has no such policy; predict today's with "
            "--as-of today"
        )
    return modes[policy]
