"""Where optimizer state of flat parameter groups lives: in host memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from deepspeed import comm as dist
from torch import Tensor

from deep_optimizer_states.device.base import Device
from deep_optimizer_states.kernels.host import Tail
from deep_optimizer_states.kernels.tensors import AdamTensors
from deep_optimizer_states.schedule import Schedule
from deep_optimizer_states.zero.homes import StateHomes
from deep_optimizer_states.zero12.stock import Run, Stock


class FlatHomes(StateHomes):
    """Homes of parameter groups, of each of which a subgroup is a run of elements.

    Args:
        stock: DeepSpeed's optimizer.
        runs: The subgroups.
        schedule: None of them is resident.
        lanes: Whose memory it is.
    """

    def __init__(
        self, stock: Stock, runs: Sequence[Run], schedule: Schedule, lanes: Device
    ) -> None:
        super().__init__(stock, [run.numel for run in runs], schedule, lanes)
        self._flat = stock
        self._runs = runs

    def _state_of(self, group: int) -> dict[str, Any]:
        state: dict[str, Any] = self._flat.optimizer.state[self._masters[group]]
        if not state:  # stock has none before the first step, in checkpoints neither
            state |= {"step": 0, **self._moments[group]}
        return state

    def tensors_of(self, subgroup: int, grad: Tensor) -> AdamTensors:
        """State and 16-bit weights of a subgroup where they live, beside a gradient of its."""
        run = self._runs[subgroup]
        state, rank = self._state_of(run.group), dist.get_rank(self._ranks_of(run.group))
        # Looked up anew: stock makes others when states were offloaded and came back.
        weights = self._flat.parallel_partitioned_bit16_groups[run.group][rank]
        whole = (self._masters[run.group], state["exp_avg"], state["exp_avg_sq"])
        master, exp_avg, exp_avg_sq = [run.of(tensor.data) for tensor in whole]
        return AdamTensors(master, exp_avg, exp_avg_sq, grad, run.of(weights.data))

    def _ranks_of(self, group: int) -> Any:
        return self._flat.real_dp_process_group[group]

    def group_of(self, subgroup: int) -> int:
        """The parameter group that a subgroup is of."""
        return self._runs[subgroup].group

    def count_step(self, subgroup: int) -> int:
        """Step stock's counter of the group, once for all of its subgroups."""
        run = self._runs[subgroup]
        state = self._state_of(run.group)
        if run.start == 0:
            state["step"] += 1
        return int(state["step"])

    def tail_start(self, subgroup: int, tail: Tail) -> int:
        """First element that is rounded as a tail: stock steps the whole group at once."""
        run = self._runs[subgroup]
        return tail.start(self._masters[run.group].numel()) - run.start
