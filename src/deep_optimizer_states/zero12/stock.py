"""What the adapter's objects read of DeepSpeed's optimizer, and how its flat state is cut.

Stock has one flat master weight a parameter group, of which every rank has an equal part. That is
cut into runs of elements here, which are the subgroups of the plan: the knobs of a policy mean what
they mean at stage 3. Neither storage nor checkpoints know of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from deep_optimizer_states.plan import cut_flat_state
from deep_optimizer_states.zero.stock import AnyStock


class Stock(AnyStock, Protocol):
    """The attributes of DeepSpeed's optimizer that the adapter's objects read, and no others."""

    partition_size: list[int]
    """Elements of this rank's part of each parameter group, padding included."""
    parallel_partitioned_bit16_groups: list[list[Tensor]]
    """16-bit weights by parameter group and rank, each 1-D."""
    grad_position: dict[int, list[int]]
    """Parameter -> group, first element of its own that is here, first one of the group's, number.
    Only of parameters of which this rank has something."""
    real_dp_process_group: list[Any]
    """Ranks that share a parameter group."""


@dataclass(frozen=True)
class Run:
    """Elements ``start`` to ``start + numel`` of this rank's part of a parameter group."""

    group: int
    start: int
    numel: int

    def of(self, flat: Tensor) -> Tensor:
        """These elements of a 1-D tensor as long as the group's part."""
        return flat.narrow(0, self.start, self.numel)


def cut_groups(group_numels: Sequence[int], subgroup_numel: int) -> list[Run]:
    """Cut every group into subgroups, in order.

    Args:
        group_numels: Elements of this rank's part of each parameter group.
        subgroup_numel: Elements of a subgroup, as ``cut_flat_state`` takes them.
    """
    return [
        Run(group, start, length)
        for group, numel in enumerate(group_numels)
        for start, length in cut_flat_state(numel, subgroup_numel)
    ]
