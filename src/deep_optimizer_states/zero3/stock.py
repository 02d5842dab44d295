"""What the adapter's objects read of DeepSpeed's optimizer, and how stock has cut the parameters.

A parameter is named by its ``ds_id`` everywhere, which is also what stock's ``get_param_id`` gives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from deep_optimizer_states.plan import Tile, subgroup_offsets
from deep_optimizer_states.zero.stock import AnyStock


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
    """Which micro-batch of the accumulation window runs, from 0."""
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
        """Whether the accumulation window ends with this micro-batch."""

    def _constant_buffered_norm2(self, grad: Tensor) -> Tensor: ...

    def _get_param_partition_rank(self, param: Any) -> int: ...

    def _get_param_partition_group(self, param: Any) -> Any: ...


@dataclass(frozen=True)
class Layout:
    """Where this rank's slices of the parameters lie, which never changes once stock has cut them.

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

    def view(self, flat: Tensor, ds_id: int) -> Tensor:
        """A parameter's slice of a buffer that holds all subgroups, 1-D."""
        found = self.slices[ds_id]
        return flat.narrow(0, self.starts[found.subgroup] + found.start, found.numel)


def _are_on_host(weights: list[Tensor]) -> bool:
    """Whether ``zero.Init(remote_device="cpu")`` has left them there without ``offload_param``."""
    return any(not get_accelerator().on_accelerator(flat) for flat in weights)
