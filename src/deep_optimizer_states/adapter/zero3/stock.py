"""DeepSpeed's ZeRO-3 optimizer: what is read of it, its layout, where its state lives.

A parameter is named by its ``ds_id`` everywhere, which is also what stock's ``get_param_id`` gives.
Releases before 0.19 lack some of its methods: a subclass adds them, so that the rest of this
package knows one stock only. It changes nothing that stock itself computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from torch import Tensor
from typing_extensions import override

from deep_optimizer_states.adapter.homes import AnyStock, StateHomes, SubgroupSlice
from deep_optimizer_states.core.device.base import Device
from deep_optimizer_states.core.plan import Tile, subgroup_offsets
from deep_optimizer_states.core.schedule import Schedule, separate_ranges


class Stock(AnyStock, Protocol):
    """The attributes of DeepSpeed's optimizer that the adapter's objects read, and no others.

    The objects never assign to them: what stock expects to be changed, ``optimizer`` changes.
    """

    module: Any
    """The model."""
    clip_grad: float
    """The norm that gradients are clipped to; 0 for no clipping."""
    loss_scale: float
    gradient_accumulation_dtype: torch.dtype
    master_weights_and_grads_dtype: torch.dtype
    """Type of master weights, and of the gradient that stock unscales and steps by."""
    gradient_accumulation_steps: int
    reduce_bucket_size: int
    """Elements of one bucket of gradients."""
    micro_step_id: int
    """Number of the micro-batch in the accumulation window, from 0."""
    fp16_groups: list[list[Any]]
    """Parameters by subgroup."""
    fp16_partitioned_groups_flat: list[Tensor]
    """This rank's 16-bit weights by subgroup, each 1-D: on the device, or in host memory."""
    fp16_partitioned_groups_flat_numel: list[int]
    param_groups_fp16_flat_cpu_memory: list[Tensor]
    """Host memory of all 16-bit weights, by parameter group; empty without ``offload_param``."""
    grad_partitions_flat_buffer: Tensor
    """This rank's gradients in the accumulation type, 1-D, subgroup after subgroup."""
    norm_for_param_grads: dict[int, Tensor]
    """Norms of the gradients of this window, by parameter."""
    sub_group_to_group_id: dict[int, int]
    persistent_parameters: list[Any]
    """Parameters that are never partitioned while the model runs: norms, biases."""
    param_names: dict[Any, str]
    _offload_boundary_param_ids: set[int]
    """Parameters that got a gradient in this window."""

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return whether the accumulation window ends with this micro-batch."""

    def _constant_buffered_norm2(self, grad: Tensor) -> Tensor: ...

    def _get_param_partition_rank(self, param: Any) -> int: ...

    def _get_param_partition_group(self, param: Any) -> Any: ...


@dataclass(frozen=True)
class Layout:
    """This rank's slices of the parameters, which never change once stock has cut them.

    Attributes:
        numels: Elements of each subgroup.
        starts: First element of each subgroup in buffers that hold them all.
        slices: Each parameter's slice of its subgroup, in stock's order.
        owned: Parameters of whose slice something is not padding.
        persistent: Slices of the parameters that ``step()`` itself gathers.
        weights_on_host: Whether 16-bit weights live in host memory.
    """

    numels: list[int]
    starts: list[int]
    slices: dict[int, Tile]
    owned: frozenset[int]
    persistent: list[Tile]
    weights_on_host: bool = False

    @classmethod
    def of(cls, stock: Stock) -> Layout:
        """Read it from an optimizer that has cut its parameters into subgroups."""
        slices, owned = {}, set()
        for subgroup, group in enumerate(stock.fp16_groups):
            start = 0
            for param in group:
                numel = int(param.partition_numel())
                slices[param.ds_id] = Tile(subgroup, start, numel)
                if numel * stock._get_param_partition_rank(param) < param.ds_numel:
                    owned.add(param.ds_id)
                start += numel
        numels = [int(numel) for numel in stock.fp16_partitioned_groups_flat_numel]
        ids = [param.ds_id for param in stock.persistent_parameters]
        persistent = [slices[ds_id] for ds_id in ids if ds_id in slices]
        starts = subgroup_offsets(numels)
        # Without a GPU device memory is host memory as well, so the tensors do not tell.
        on_host = bool(stock.param_groups_fp16_flat_cpu_memory)
        on_host |= _are_on_host(stock.fp16_partitioned_groups_flat)
        return cls(numels, starts, slices, frozenset(owned), persistent, on_host)

    @property
    def separate(self) -> Sequence[Tile]:
        """Slices that get tiles of their own."""
        return separate_ranges(self.persistent, sum(self.numels))

    def view(self, flat: Tensor, ds_id: int) -> Tensor:
        """Return a parameter's slice of a buffer that holds all subgroups, 1-D."""
        found = self.slices[ds_id]
        return flat.narrow(0, self.starts[found.subgroup] + found.start, found.numel)


def _are_on_host(weights: list[Tensor]) -> bool:
    # zero.Init(remote_device="cpu") leaves them there without offload_param.
    return any(not get_accelerator().on_accelerator(flat) for flat in weights)


class ZeroOptimizerBefore019(DeepSpeedZeroOptimizer_Stage3):
    """Stock's optimizer of a release before 0.19, which knows fewer groups and ends of windows."""

    _offload_boundary_param_ids: set[int]
    dp_process_group: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._offload_boundary_param_ids = set()
        self._ends_window = True
        super().__init__(*args, **kwargs)

    @property
    def is_gradient_accumulation_boundary(self) -> Callable[[], bool]:
        """Stand for the method of 0.19; before, the engine and stock assign a truth value."""
        return lambda: self._ends_window

    @is_gradient_accumulation_boundary.setter
    def is_gradient_accumulation_boundary(self, ends_window: bool) -> None:
        self._ends_window = ends_window

    def _pre_step(self) -> None:
        super()._pre_step()
        self._offload_boundary_param_ids = set()

    # Experts may be spread over other ranks than the rest since 0.19; before, all of a kind.

    def _get_param_partition_group(self, _param: Any) -> Any:
        return self.dp_process_group

    def _get_param_partition_rank(self, _param: Any) -> int:
        return int(dist.get_rank(group=self.dp_process_group))

    def _autoep_expert_parallel_group(self, _params: Any) -> None:
        return None


def has_methods_of_0_19() -> bool:
    """Return whether this DeepSpeed's optimizer is of 0.19 or newer."""
    return hasattr(DeepSpeedZeroOptimizer_Stage3, "finalize_gradient_accumulation_boundary")


StockZeroOptimizer: Any = (
    DeepSpeedZeroOptimizer_Stage3 if has_methods_of_0_19() else ZeroOptimizerBefore019
)
"""The base class of our optimizer."""


class SubgroupHomes(StateHomes):
    """Homes of subgroups, each of which is a master weight of its own.

    Resident ones have theirs on the device.
    """

    def __init__(self, stock: Stock, layout: Layout, schedule: Schedule, lanes: Device) -> None:
        slices = [SubgroupSlice(idx, 0, numel) for idx, numel in enumerate(layout.numels)]
        super().__init__(stock, slices, schedule, lanes)
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
        """Return a checkpoint's contents as stock would have them before the first update.

        Stock has no moments then and makes them in their own type later. Zeros in a checkpoint
        would come back in the type of the master weights, and stay so.
        """
        inner = state_dict["optimizer_state_dict"]
        if self._moments_dtype == self._stock.master_weights_and_grads_dtype:
            return state_dict
        kept = {idx: state for idx, state in inner["state"].items() if state["step"]}
        return {**state_dict, "optimizer_state_dict": {**inner, "state": kept}}

    @override
    def weights_of(self, number: int) -> Tensor:
        return self._zero3.fp16_partitioned_groups_flat[number]

    @override
    def group_of(self, subgroup: int) -> int:
        return self._zero3.sub_group_to_group_id[subgroup]
