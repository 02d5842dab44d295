"""How stock DeepSpeed updates offloaded state; also the base for other software that does.

A workload names such software in its field ``software``. What is not overridden is as in today's
DeepSpeed ZeRO-3 with its optimizer offloaded to the host.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from deep_optimizer_states.plan import HOST_CHAIN, RESIDENT_CHAIN, Action
from deep_optimizer_states.predict.closed_form import Estimate
from deep_optimizer_states.predict.machine import Costs, Machine
from deep_optimizer_states.predict.memory_need import power_of_two
from deep_optimizer_states.predict.rank import STATE_BYTES, Rank
from deep_optimizer_states.predict.update_sim import FP32_BYTES, State, UpdateSimulator
from deep_optimizer_states.predict.workload import Workload
from deep_optimizer_states.split import RunTimeSplit


class StockSimulator(UpdateSimulator):
    """Subgroup after subgroup, and a copy of fp32 weights that the host waits for."""

    def work(self, state: State, split: RunTimeSplit) -> tuple[list[int], Iterable[Action]]:
        """Subgroups are not cut into tiles."""
        assert self.workload.software is not None
        return list(self.workload.subgroups), self.workload.software.actions(self.workload)

    def weights(self, tile: int, numel: int, state: State) -> None:
        """Send fp32 master weights, which the device rounds."""
        job = self.block(f"weights {tile}", numel, self.rank.blocking_bytes_per_s, state)
        state.held.pop(tile).free = state.ready[tile] = job


@dataclass(frozen=True)
class StockOffload:
    """Today's DeepSpeed, and what other software may do otherwise.

    Attributes:
        name: Printed beside predictions.
        words: Who updates what, for a prediction.
        flush_bytes: Bytes of a gradient that are copied to the host: today's DeepSpeed copies it as
            it is, and again as fp32.
        hides_flush: Whether those copies run behind backward, at the rate of page-locked memory;
            else they come after it, at the rate of pageable memory.
        simulator: Simulates an update.
    """

    name: str = "zero3"
    words: str = "every subgroup on the CPU"
    flush_bytes: int = 6
    hides_flush: bool = True
    simulator: type[UpdateSimulator] = StockSimulator

    def check(self, workload: Workload) -> None:
        """Refuse what the software cannot do.

        Raises:
            WorkloadError: Names the field, its value and the reason.
        """

    def describe(self, workload: Workload, machine: Machine) -> str:
        """Who updates what, in words."""
        return self.words

    def resident_subgroups(self, workload: Workload) -> frozenset[int]:
        """Subgroups whose state stays on the device: the first ones."""
        return frozenset(range(int((1 - workload.offload_ratio) * len(workload.subgroups))))

    def slot_numel(self, workload: Workload) -> int:
        """Elements of the device's slots for state that passes through it."""
        return 0

    def actions(self, workload: Workload) -> list[Action]:
        """The actions of an update on subgroups, in issue order: those of the device come last."""
        resident = self.resident_subgroups(workload)
        rest = (idx for idx in range(len(workload.subgroups)) if idx not in resident)
        chains = [(idx, HOST_CHAIN) for idx in rest]
        last = [(idx, RESIDENT_CHAIN) for idx in sorted(resident)]
        return [Action(idx, kind) for idx, chain in (*chains, *last) for kind in chain]

    def estimate_update(self, workload: Workload, rank: Rank) -> Estimate:
        """The update in closed form: host Adam and a copy that blocks, one after the other."""
        resident = self.resident_subgroups(workload)
        numels = workload.subgroups
        host = sum(numel for idx, numel in enumerate(numels) if idx not in resident)
        adam = host / rank.host_alone_parameters_per_s
        copies = host * FP32_BYTES / min(rank.blocking_bytes_per_s, rank.host_bytes_per_s)
        device = (sum(numels) - host) / rank.device_parameters_per_s
        lanes = {"host Adam": adam, "copies to the GPU": copies, "device Adam": device}
        return Estimate(sum(lanes.values()), lanes)

    def copy_bytes_per_s(self, machine: Machine) -> float:
        """Rate of copies to the device that a host thread waits for."""
        return machine.rate("h2d_bytes_per_s")

    def host_state_bytes(self, numels: Sequence[int]) -> tuple[float, float]:
        """Host memory of the state and fp32 gradients of subgroups.

        Returns:
            Page-locked bytes, and others.
        """
        gradients = sum(power_of_two(FP32_BYTES * numel) for numel in numels)
        return STATE_BYTES * sum(numels) + gradients, 0.0

    def extra_s(self, costs: Costs) -> tuple[float, float]:
        """Seconds that the software adds to a forward, and to what lies outside the phases."""
        return 0.0, 0.0

    @property
    def all_resident(self) -> StockOffload:
        """The software whose prediction stands for this one's at ratio 0."""
        return self


STOCK = StockOffload()
