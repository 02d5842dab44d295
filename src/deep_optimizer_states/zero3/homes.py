"""Where optimizer state of ZeRO-3's subgroups lives: in host memory, or on the device."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from deep_optimizer_states.device.base import Device
from deep_optimizer_states.kernels.host import Tail
from deep_optimizer_states.kernels.tensors import AdamTensors
from deep_optimizer_states.schedule import Schedule
from deep_optimizer_states.zero.homes import StateHomes
from deep_optimizer_states.zero3.stock import Layout, Stock


class SubgroupHomes(StateHomes):
    """Homes of subgroups, each of which is a master weight of its own.

    Resident ones have theirs on the device.

    Args:
        stock: DeepSpeed's optimizer.
        layout: How it has cut the parameters.
        schedule: Which subgroups are resident.
        lanes: Whose memory it is.
    """

    def __init__(self, stock: Stock, layout: Layout, schedule: Schedule, lanes: Device) -> None:
        super().__init__(stock, layout.numels, schedule, lanes)
        self._zero3 = stock

    def make_moments(self) -> None:
        """Create the moments where they live; stock has some from the beginning."""
        super().make_moments()
        for master, moments in zip(self._masters, self._moments, strict=True):
            self._zero3.optimizer.state[master] = {"step": 0, **moments}

    def _home_of(self, number: int, source: Tensor) -> Tensor:
        if number in self._schedule.resident_subgroups:
            return self._lanes.empty_device(source.numel(), source.dtype).copy_(source)
        return super()._home_of(number, source)

    def return_home(self) -> None:
        """Copy loaded moments home; a checkpoint from before the first step has none."""
        for master in self._masters:
            self._zero3.optimizer.state.setdefault(master, {"step": 0})
        super().return_home()

    def without_fresh_moments(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """A checkpoint's contents as stock would have them before the first update.

        Stock has no moments then and makes them in their own type later. Zeros in a checkpoint
        would come back in the type of the master weights, and stay so.
        """
        inner = state_dict["optimizer_state_dict"]
        if self._moments_dtype == self._stock.master_weights_and_grads_dtype:
            return state_dict
        kept = {idx: state for idx, state in inner["state"].items() if state["step"]}
        return {**state_dict, "optimizer_state_dict": {**inner, "state": kept}}

    def _state_of(self, subgroup: int) -> dict[str, Any]:
        found: dict[str, Any] = self._zero3.optimizer.state[self._masters[subgroup]]
        return found

    def tensors_of(self, subgroup: int, grad: Tensor) -> AdamTensors:
        """State and 16-bit weights of a subgroup where they live, beside a gradient of its."""
        master, state = self._masters[subgroup], self._state_of(subgroup)
        weights = self._zero3.fp16_partitioned_groups_flat[subgroup].data
        return AdamTensors(master.data, state["exp_avg"], state["exp_avg_sq"], grad, weights)

    def group_of(self, subgroup: int) -> int:
        """The parameter group that a subgroup is of."""
        return self._zero3.sub_group_to_group_id[subgroup]

    def count_step(self, subgroup: int) -> int:
        """Step stock's counter of a subgroup, as its own update would."""
        state = self._state_of(subgroup)
        state["step"] += 1
        return int(state["step"])

    def tail_start(self, subgroup: int, tail: Tail) -> int:
        """First element that is rounded as a tail: stock steps a subgroup at once."""
        return tail.start(self._numels[subgroup])
