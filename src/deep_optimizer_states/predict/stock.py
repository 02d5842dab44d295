"""Stock DeepSpeed's update of offloaded state, and the base of other software's simulators."""

from __future__ import annotations

from collections.abc import Iterable

from deep_optimizer_states.plan import Action
from deep_optimizer_states.predict.update_sim import State, UpdateSimulator
from deep_optimizer_states.predict.workload import StockOffload
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


STOCK = StockOffload(StockSimulator)
