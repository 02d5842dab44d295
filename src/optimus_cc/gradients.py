"""The reduction of a stage's gradients at the end of an iteration: whole, by SC, and with FE.

The order is that of an unfused one: the mean over the data-parallel ranks, then the sum of the tied
embedding's parts: the first stage looks tokens up in the embedding and the last one computes logits
with it, so its gradient is a sum over both.

Fused embedding synchronisation (FE) makes the two reductions of the embedding one all-reduce over
{first, last stage} x replicas. With V bytes a copy and D replicas a ring then sends
V (2 D - 1) / D from each rank instead of V (3 D - 2) / D.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed as dist

from optimus_cc.selective import Compressor, by_type, compressor, copy_back
from optimus_cc.settings import Settings
from optimus_cc.traffic import COMPRESSION, Kind, Traffic


@dataclass(frozen=True)
class Place:
    """Where a rank stands, as far as the tied embedding is concerned."""

    shard: int
    """Its part of the vocabulary: its tensor-parallel rank."""
    replica: int
    """Its data-parallel rank."""
    has_embedding: bool
    """True on the first and the last stage."""


def group_ranks(places: list[Place], fused: bool) -> list[list[int]]:
    """Return the ranks that add their gradients of the embedding, group by group.

    Each tensor-parallel rank holds another shard of the vocabulary, and has a group of its own.

    Args:
        places: of all ranks, in their order.
        fused: over all replicas, or for each replica apart.
    """
    groups: dict[tuple[int, int], list[int]] = {}
    for rank, place in enumerate(places):
        if place.has_embedding:
            key = (place.shard, 0 if fused else place.replica)
            groups.setdefault(key, []).append(rank)
    return [groups[key] for key in sorted(groups)]


def make_group(place: Place, fused: bool) -> dist.ProcessGroup | None:
    """Make the groups of all ranks; every rank of the job calls this.

    Returns:
        The group of this rank, which is at ``place``; None where it has no embedding.
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
    """True where the group is over all replicas."""


@dataclass(frozen=True)
class Stage:
    """One stage of a pipeline."""

    index: int
    """From 0."""
    num_stages: int
    replicas: dist.ProcessGroup
    """The data-parallel ranks that hold it."""


class GradientReduction:
    """Reduces the gradients of one rank's parameters once every iteration."""

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        stage: Stage,
        settings: Settings,
        *,
        num_iterations: int,
        tied: TiedEmbedding | None = None,
        traffic: Traffic | None = None,
    ) -> None:
        """Sort the parameters into those that are compressed and the others.

        Args:
            parameters: of this rank, in the same order on all data-parallel ranks.
            stage: of this rank.
            settings: which schemes are used.
            num_iterations: of the whole training, of which SC's warm-up is a share.
            tied: the tied embedding on a rank that has it; its weight is one of ``parameters``.
            traffic: where what is sent is counted and timed.

        Raises:
            SettingsError: the settings do not go with the pipeline.
            ValueError: the embedding is not tied as the settings ask.
        """
        settings.check_stages(stage.num_stages)
        if tied is not None and tied.fused != settings.emb_comm_opt:
            raise ValueError(
                f"emb_comm_opt = {settings.emb_comm_opt}: the embedding's group was made with "
                f"fused={tied.fused}; make it with fused={settings.emb_comm_opt}"
            )
        self._group = stage.replicas
        self._num_replicas = dist.get_world_size(stage.replicas)
        self._tied = tied
        self._traffic = traffic or Traffic()
        self._iteration = 0
        left_out = tied.weight if tied is not None and tied.fused else None
        self._averaged = [p for p in parameters if p.requires_grad and p is not left_out]
        self._compressor: Compressor | None = None
        self._warm_up = 0
        if settings.compresses_gradients_of(stage.index) and self._num_replicas > 1:
            self._compressor = compressor(settings, stage.replicas, self._traffic)
            self._warm_up = settings.warm_up_iterations(num_iterations)

    @torch.no_grad()
    def reduce(self) -> None:
        """Reduce all gradients in place; every rank of the pipeline calls it once an iteration.

        A parameter without a gradient gets zeros, since other ranks may have one.
        """
        gradients = [gradient_of(p) for p in self._averaged]
        if self._num_replicas > 1:
            compressed: list[Tensor] = []
            if self._compressor is not None and self._iteration >= self._warm_up:
                compressed = [g for g in gradients if self._compressor.takes(g)]
                with self._traffic.timed(COMPRESSION):
                    self._compressor.average(compressed)
            small = {id(g) for g in compressed}
            with self._traffic.timed(Kind.GRADIENTS):
                self._average_whole([g for g in gradients if id(g) not in small])
        if self._tied is not None:
            self._add_embedding(self._tied)
        self._iteration += 1

    def _average_whole(self, gradients: list[Tensor]) -> None:
        for flat, members in by_type(gradients):
            dist.all_reduce(flat.div_(self._num_replicas), group=self._group)
            self._traffic.all_reduce(Kind.GRADIENTS, flat, self._num_replicas)
            copy_back(flat, members)

    def _add_embedding(self, tied: TiedEmbedding) -> None:
        gradient = gradient_of(tied.weight)
        with self._traffic.timed(Kind.EMBEDDING):
            if tied.fused:  # else it is averaged over the replicas already
                gradient.div_(self._num_replicas)
            dist.all_reduce(gradient, group=tied.group)
        self._traffic.all_reduce(Kind.EMBEDDING, gradient, dist.get_world_size(tied.group))

    def state_dict(self) -> dict[str, Any]:
        """Return iteration, queries and errors, to go on as if training had not stopped."""
        kept = self._compressor.memory.state_dict() if self._compressor is not None else None
        return {"iteration": self._iteration, "power_sgd": kept}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave."""
        self._iteration = state["iteration"]
        if self._compressor is not None and state["power_sgd"] is not None:
            self._compressor.memory.load_state_dict(state["power_sgd"])


def gradient_of(parameter: torch.nn.Parameter) -> Tensor:
    """Return where a gradient is accumulated: megatron-core's ``main_grad``, or ``grad``."""
    main: Tensor | None = getattr(parameter, "main_grad", None)
    if main is not None:
        return main
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad
