"""The reduction of a stage's gradients at the end of an iteration: whole, by SC, and with FE.

The order is that of an unfused one: the mean over the data-parallel ranks, then the sum of the tied
embedding's parts. With FE the embedding leaves the first and is reduced once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed as dist

from optimus_cc.embedding import TiedEmbedding
from optimus_cc.selective import Compressor, compressor
from optimus_cc.settings import Settings
from optimus_cc.traffic import COMPRESSION, Kind, Traffic


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
        trained = [p for p in parameters if p.requires_grad]
        self._averaged = [p for p in trained if p is not left_out]
        self._power_sgd: Compressor | None = None
        self._warm_up = 0
        if settings.compresses_gradients_of(stage.index) and self._num_replicas > 1:
            self._power_sgd = compressor(settings, stage.replicas, self._traffic)
            self._warm_up = settings.warm_up_iterations(num_iterations)

    @torch.no_grad()
    def reduce(self) -> None:
        """Reduce all gradients in place; every rank of the pipeline calls it once an iteration.

        A parameter without a gradient gets zeros, since other ranks may have one.
        """
        gradients = [gradient_of(p) for p in self._averaged]
        if self._num_replicas > 1:
            compressed: list[Tensor] = []
            if self._power_sgd is not None and self._iteration >= self._warm_up:
                compressed = [g for g in gradients if self._power_sgd.takes(g)]
                with self._traffic.timed(COMPRESSION):
                    self._power_sgd.average(compressed)
            small = {id(g) for g in compressed}
            with self._traffic.timed(Kind.GRADIENTS):
                self._average_whole([g for g in gradients if id(g) not in small])
        if self._tied is not None:
            gradient = gradient_of(self._tied.weight)
            with self._traffic.timed(Kind.EMBEDDING):
                self._tied.add(gradient, self._num_replicas)
            num_ranks = dist.get_world_size(self._tied.group)
            self._traffic.all_reduce(Kind.EMBEDDING, gradient, num_ranks)
        self._iteration += 1

    def _average_whole(self, gradients: list[Tensor]) -> None:
        """One all-reduce for all gradients of a type."""
        for dtype in sorted({g.dtype for g in gradients}, key=str):
            alike = [g for g in gradients if g.dtype == dtype]
            flat = torch.cat([g.flatten() for g in alike]).div_(self._num_replicas)
            dist.all_reduce(flat, group=self._group)
            self._traffic.all_reduce(Kind.GRADIENTS, flat, self._num_replicas)
            parts = torch.split(flat, [g.numel() for g in alike])
            for gradient, part in zip(alike, parts, strict=True):
                gradient.copy_(part.view_as(gradient))

    def state_dict(self) -> dict[str, Any]:
        """Iteration, queries and errors, to go on as if training had not stopped."""
        power_sgd = self._power_sgd.state_dict() if self._power_sgd is not None else None
        return {"iteration": self._iteration, "power_sgd": power_sgd}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave."""
        self._iteration = state["iteration"]
        if self._power_sgd is not None and state["power_sgd"] is not None:
            self._power_sgd.load_state_dict(state["power_sgd"])


def gradient_of(parameter: torch.nn.Parameter) -> Tensor:
    """Where a parameter's gradient is accumulated: megatron-core's ``main_grad``, or ``grad``."""
    main: Tensor | None = getattr(parameter, "main_grad", None)
    if main is not None:
        return main
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad
