"""Compressed backpropagation (CB): activation gradients cross pipeline links as low-rank pairs.

A message is a matrix with one row a token and one column a hidden unit. P and Q travel as one flat
tensor of the message's own type, so that both ends agree on its size from the message's shape
alone. With lazy error propagation (LEP) the sender adds to each message what the last compressed
one left out.

Link ``r + 1 -> r`` of ``num_stages`` carries its last ``num_stages - r - 1`` micro-batches in the
epilogue: after the sender's last forward there is nothing left to overlap them with.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from optimus_cc import low_rank
from optimus_cc.error_feedback import ErrorFeedback
from optimus_cc.settings import Settings
from optimus_cc.sizes import num_epilogue_messages
from optimus_cc.traffic import Kind, Traffic

__all__ = ["BackwardCompressor", "in_epilogue", "num_epilogue_messages"]


def in_epilogue(
    micro_batch: int, *, receiver: int, num_stages: int, num_micro_batches: int
) -> bool:
    """Whether a micro-batch (from 0) crosses the link to ``receiver`` in the epilogue."""
    late = num_epilogue_messages(receiver, num_stages, num_micro_batches)
    return micro_batch >= num_micro_batches - late


class BackwardCompressor:
    """Compresses the activation gradients that a stage sends, restores those that it receives.

    Tensor-parallel ranks each send the same message over a link of their own, and what arrives
    must be the same again: all ranks start from the same queries.
    """

    def __init__(self, settings: Settings, traffic: Traffic | None = None, seed: int = 0) -> None:
        """Keep the settings.

        Args:
            settings: what is compressed, and at which rank.
            traffic: where sent messages are counted.
            seed: of the first queries; the same on all ranks.
        """
        self._settings = settings
        self._traffic = traffic or Traffic()
        self._low_rank = low_rank.LowRank(settings.inter_grad_comp_rank, seed)
        self._feedback = ErrorFeedback(settings.use_error_feedback)

    def compress(self, gradient: Tensor, in_epilogue: bool, stream: Hashable = 0) -> Tensor:
        """What to send in place of an activation gradient.

        Args:
            gradient: (..., hidden) fp32 or bf16.
            in_epilogue: whether it is sent in the epilogue.
            stream: tells the messages of a stage apart that are sent for every micro-batch; they
                have queries and errors of their own.

        Returns:
            P and Q in one flat tensor of the gradient's type, or the gradient itself where it is
            to be sent whole: outside the epilogue, if so set, and where P and Q are not smaller.

        Raises:
            TypeError: the gradient is of another type.
        """
        whole = not self._is_compressed(gradient.shape, in_epilogue)
        packed = gradient if whole else self._pack(gradient, stream)
        self._traffic.message(Kind.BACKWARD, packed, compressed=not whole)
        return packed

    def received_shape(self, shape: torch.Size, in_epilogue: bool) -> torch.Size:
        """Shape of what :meth:`compress` sends for a gradient of ``shape``."""
        shape = torch.Size(shape)
        if not self._is_compressed(shape, in_epilogue):
            return shape
        rows, columns = low_rank.matrix_shape(shape)
        return torch.Size([low_rank.pair_numel(rows, columns, self._low_rank.rank)])

    def restore(self, received: Tensor, shape: torch.Size, in_epilogue: bool) -> Tensor:
        """The gradient that a received message stands for.

        Args:
            received: of :meth:`received_shape`.
            shape: of the gradient.
            in_epilogue: as the sender had it.

        Returns:
            The gradient, of ``shape``, in the type of ``received``.
        """
        shape = torch.Size(shape)
        if not self._is_compressed(shape, in_epilogue):
            return received
        return self._product(received, shape).to(received.dtype)

    def error(self, shape: torch.Size, stream: Hashable = 0) -> Tensor | None:
        """What the last compressed message of a stream left out, of ``shape``, fp32."""
        return self._feedback.error((stream, tuple(shape)))

    def state_dict(self) -> dict[str, Any]:
        """Queries and errors, to go on as if training had not stopped."""
        return {**self._low_rank.state_dict(), **self._feedback.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave."""
        self._low_rank.load_state_dict(state)
        self._feedback.load_state_dict(state)

    def _is_compressed(self, shape: torch.Size, in_epilogue: bool) -> bool:
        return self._settings.compresses_message(in_epilogue) and low_rank.saves(
            shape, self._low_rank.rank
        )

    @torch.no_grad()
    def _pack(self, gradient: Tensor, stream: Hashable) -> Tensor:
        low_rank.require_dtype(gradient)
        # A last, smaller batch has queries and errors of its own.
        key = (stream, tuple(gradient.shape))
        given = self._feedback.add(key, gradient)
        matrix = given.reshape(1, *low_rank.matrix_shape(gradient.shape))
        pair = self._low_rank.factorise(key, matrix)
        packed = torch.cat([factor.flatten() for factor in pair]).to(gradient.dtype)
        # The error is against what arrives, rounding to the message's type included.
        self._feedback.keep(key, given, self._product(packed, gradient.shape))
        return packed

    def _product(self, packed: Tensor, shape: torch.Size) -> Tensor:
        """P Qᵀ in fp32, of ``shape``."""
        rows, columns = low_rank.matrix_shape(shape)
        rank = packed.numel() // (rows + columns)
        p, q = torch.split(packed.float(), [rows * rank, columns * rank])
        product: Tensor = p.view(rows, rank) @ q.view(columns, rank).T
        return product.view(shape)
