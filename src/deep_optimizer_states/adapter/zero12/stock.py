"""What the objects here read of DeepSpeed's optimizer of ZeRO-1 and ZeRO-2, and its subgroups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from deepspeed import comm as dist
from torch import Tensor
from typing_extensions import override

from deep_optimizer_states.adapter.homes import AnyStock, StateHomes, SubgroupSlice
from deep_optimizer_states.core.device.base import Device
from deep_optimizer_states.core.plan import Tile, cut_flat_state
from deep_optimizer_states.core.schedule import Schedule


class Stock(AnyStock, Protocol):
    """The attributes of DeepSpeed's optimizer that the objects here read, and no others."""

    partition_size: list[int]
    """Elements of this rank's part of each parameter group, padding included."""
    parallel_partitioned_bit16_groups: list[list[Tensor]]
    """16-bit weights by parameter group and rank, each 1-D."""
    grad_position: dict[int, list[int]]
    """Parameter -> group, first element of its own that is here, first one of the group's, number.
    Only of parameters of which this rank has something."""
    reduce_bucket_size: int
    """Elements of a bucket of gradients."""
    real_dp_process_group: list[Any]
    """Ranks that share a parameter group."""
    gradient_accumulation_dtype: torch.dtype
    """Type that backward sums gradients in: that of the weights, or fp32."""


def cut_groups(group_numels: Sequence[int], subgroup_numel: int) -> list[SubgroupSlice]:
    """Cut every group into subgroups, in order."""
    return [
        SubgroupSlice(group, start, length)
        for group, numel in enumerate(group_numels)
        for start, length in cut_flat_state(numel, subgroup_numel)
    ]


def runs_within(slices: Sequence[SubgroupSlice], part: SubgroupSlice) -> list[Tile]:
    """Return the elements of a part of a group, a run for each subgroup that has some."""
    runs = []
    for idx, whole in enumerate(slices):
        start = max(part.start, whole.start)
        end = min(part.start + part.numel, whole.start + whole.numel)
        if whole.master == part.master and start < end:
            runs.append(Tile(idx, start - whole.start, end - start))
    return runs


class FlatHomes(StateHomes):
    """Homes of parameter groups, in host memory; a subgroup is a slice of one."""

    def __init__(
        self, stock: Stock, slices: Sequence[SubgroupSlice], schedule: Schedule, lanes: Device
    ) -> None:
        super().__init__(stock, slices, schedule, lanes)
        self._flat = stock

    @override
    def weights_of(self, number: int) -> Tensor:
        rank = int(dist.get_rank(self._flat.real_dp_process_group[number]))
        return self._flat.parallel_partitioned_bit16_groups[number][rank]

    @override
    def group_of(self, subgroup: int) -> int:
        return self._slices[subgroup].master
