"""Fused embedding synchronisation (FE): a tied embedding's gradient is reduced once.

The first stage looks tokens up in the embedding and the last one computes logits with it, so its
gradient is a sum over both. Unfused, each stage averages its part over the data-parallel ranks, and
then both parts are added. Fused, the two are one all-reduce over {first, last stage} x replicas.
With V bytes a copy and D replicas a ring then sends V (2 D - 1) / D from each rank instead of
V (3 D - 2) / D.

Each tensor-parallel rank holds another shard of the vocabulary, and has a group of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, distributed as dist


@dataclass(frozen=True)
class Place:
    """Where a rank stands, as far as the tied embedding is concerned."""

    shard: int
    """Which part of the vocabulary it holds: its tensor-parallel rank."""
    replica: int
    """Its data-parallel rank."""
    has_embedding: bool
    """Whether it is of the first or the last stage."""


def group_ranks(places: list[Place], fused: bool) -> list[list[int]]:
    """Ranks that add their gradients of the embedding.

    Args:
        places: of all ranks, in their order.
        fused: over all replicas, or for each replica apart.

    Returns:
        The groups, each in the order of its ranks.
    """
    groups: dict[tuple[int, int], list[int]] = {}
    for rank, place in enumerate(places):
        if place.has_embedding:
            key = (place.shard, 0 if fused else place.replica)
            groups.setdefault(key, []).append(rank)
    return [groups[key] for key in sorted(groups)]


def make_group(place: Place, fused: bool) -> dist.ProcessGroup | None:
    """Make the groups of all ranks; every rank of the job calls this.

    Args:
        place: of this rank.
        fused: see :func:`group_ranks`.

    Returns:
        This rank's group; None where it has no embedding.
    """
    places: list[Place] = [place] * dist.get_world_size()
    dist.all_gather_object(places, place)
    mine: dist.ProcessGroup | None = None
    for ranks in group_ranks(places, fused):
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            mine = group
    return mine


@dataclass(frozen=True)
class TiedEmbedding:
    """This rank's copy of the embedding, and whom its gradient is added with."""

    weight: torch.nn.Parameter
    """(rows of the shard, hidden)."""
    group: dist.ProcessGroup
    """From :func:`make_group`."""
    fused: bool
    """Whether the group is over all replicas."""

    def add(self, gradient: Tensor, num_replicas: int) -> None:
        """Add the parts, in place.

        Args:
            gradient: this rank's part, averaged over the replicas already unless fused.
            num_replicas: of the model, whose mean is taken.
        """
        if self.fused:
            gradient.div_(num_replicas)
        dist.all_reduce(gradient, group=self.group)
