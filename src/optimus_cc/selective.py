"""Selective stage compression (SC): compressed reduction of the gradients of some stages.

The first stages end their backward last, so that nothing overlaps the reduction of their gradients:
those are worth compressing. Matrices are reduced as low-rank pairs with error feedback, equal
shapes at once; vectors and small matrices are reduced whole. That is :class:`PowerSgd`, for
gradients that a schedule leaves in place until all micro-batches are through, as megatron-core's
does. :mod:`optimus_cc.peers` has other ways, and :func:`compressor` makes the one that the settings
ask for.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, distributed as dist

from optimus_cc import low_rank, peers
from optimus_cc.error_feedback import ErrorFeedback
from optimus_cc.settings import Settings
from optimus_cc.traffic import Kind, Traffic


class Compressor(Protocol):
    """Averages gradients over ranks approximately, for fewer bytes."""

    def takes(self, gradient: Tensor) -> bool:
        """Whether a gradient is worth compressing."""

    def average(self, gradients: Sequence[Tensor]) -> None:
        """Average gradients over the ranks, in place; see :meth:`PowerSgd.average`."""

    def state_dict(self) -> dict[str, Any]:
        """What is remembered from call to call."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave."""


def compressor(settings: Settings, group: dist.ProcessGroup, traffic: Traffic) -> Compressor:
    """What reduces gradients over ``group`` in the way that the settings ask for."""
    makers = {"4bit": peers.FourBit, "torch-power-sgd": peers.TorchPowerSgd}
    make: Any = makers.get(settings.grad_comp_method, PowerSgd)
    made: Compressor = make(settings, group, traffic)
    return made


class PowerSgd:
    """Averages matrices over ranks as low-rank pairs, which are all that the ranks exchange."""

    def __init__(
        self, settings: Settings, group: dist.ProcessGroup, traffic: Traffic, seed: int = 0
    ) -> None:
        """Keep the settings.

        Args:
            settings: rank and error feedback.
            group: the data-parallel ranks.
            traffic: where what is sent is counted.
            seed: of the first queries; the same on all ranks, tensor-parallel ones included.
        """
        self._group = group
        self._traffic = traffic
        self._low_rank = low_rank.LowRank(settings.grad_comp_rank, seed)
        self._feedback = ErrorFeedback(settings.use_error_feedback)

    def takes(self, gradient: Tensor) -> bool:
        """Whether a gradient is a matrix of which P and Q are smaller."""
        return gradient.dim() == 2 and low_rank.saves(gradient.shape, self._low_rank.rank)

    @torch.no_grad()
    def average(self, gradients: Sequence[Tensor]) -> None:
        """Average gradients over the ranks, in place and approximately.

        Args:
            gradients: those that :meth:`takes` accepts, (rows, columns) fp32 or bf16; the same
                ones in the same order in every call and on every rank.

        Raises:
            TypeError: a gradient is of another type.
        """
        alike: dict[tuple[int, int, torch.dtype], list[Tensor]] = {}
        for gradient in gradients:
            low_rank.require_dtype(gradient)
            rows, columns = gradient.shape
            alike.setdefault((rows, columns, gradient.dtype), []).append(gradient)
        for (rows, columns, dtype), members in alike.items():
            key = (rows, columns, str(dtype))
            given = self._feedback.add(key, torch.stack(members))
            average = functools.partial(self._average, dtype)
            p, q = self._low_rank.factorise(key, given, average)
            product = p @ q.mT
            self._feedback.keep(key, given, product)
            for member, approximation in zip(members, product, strict=True):
                member.copy_(approximation)

    def _average(self, dtype: torch.dtype, factors: Tensor) -> Tensor:
        """The mean of P or Q over the ranks, fp32; it travels in the gradients' own type."""
        wire = factors.to(dtype)
        num_ranks = dist.get_world_size(self._group)
        with self._traffic.timed(Kind.GRADIENTS):
            dist.all_reduce(wire, group=self._group)
        self._traffic.all_reduce(Kind.GRADIENTS, wire, num_ranks, compressed=True)
        return wire.float() / num_ranks

    def state_dict(self) -> dict[str, Any]:
        """Queries and errors, to go on as if training had not stopped."""
        return {**self._low_rank.state_dict(), **self._feedback.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave."""
        self._low_rank.load_state_dict(state)
        self._feedback.load_state_dict(state)
