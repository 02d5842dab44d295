"""Compressed backpropagation (CB): activation gradients cross pipeline links in fewer bytes.

They are sent as low-rank pairs, which is CB as published, or in few bits, which others propose
(:mod:`optimus_cc.formats`). Either travels as one flat tensor of the message's own type, so that
both ends agree on its size from the message's shape and type alone. With lazy error propagation
(LEP) the sender adds to each message what the last compressed one left out.

Link ``r + 1 -> r`` of ``num_stages`` carries its last ``num_stages - r - 1`` micro-batches in the
epilogue: after the sender's last forward there is nothing left to overlap them with.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from optimus_cc.error_statistics import ErrorStatistics
from optimus_cc.formats import make_format
from optimus_cc.low_rank import ErrorFeedback, Memory, require_dtype
from optimus_cc.settings import Settings
from optimus_cc.sizes import num_epilogue_messages
from optimus_cc.traffic import Kind, Traffic


def in_epilogue(
    micro_batch: int, *, receiver: int, num_stages: int, num_micro_batches: int
) -> bool:
    """Return whether a micro-batch (from 0) crosses the link to ``receiver`` in the epilogue."""
    late = num_epilogue_messages(receiver, num_stages, num_micro_batches)
    return micro_batch >= num_micro_batches - late


class BackwardCompressor:
    """Compresses the activation gradients that a stage sends, restores those that it receives.

    Tensor-parallel ranks each send the same message over a link of their own, and what arrives
    must be the same again: all ranks start from the same queries and rotate in the same way.
    """

    def __init__(self, settings: Settings, traffic: Traffic | None = None, seed: int = 0) -> None:
        """Keep the settings.

        Args:
            settings: what is compressed, and how.
            traffic: where sent messages are counted.
            seed: of the first queries, or of the rotation; the same on all ranks.
        """
        self.memory = Memory()
        self.statistics = ErrorStatistics() if settings.check_orth_error else None
        """Compares the errors with the activations; None unless that is asked for."""
        self._settings = settings
        self._traffic = traffic or Traffic()
        self._format = make_format(settings, seed, self.memory)
        self._feedback = ErrorFeedback(settings.use_error_feedback, self.memory)

    def compress(self, gradient: Tensor, in_epilogue: bool, stream: Hashable = 0) -> Tensor:
        """Return what to send in place of an activation gradient.

        Args:
            gradient: (..., hidden) fp32 or bf16.
            in_epilogue: whether it is sent in the epilogue.
            stream: tells the messages of a stage apart that are sent for every micro-batch; they
                have queries and errors of their own.

        Returns:
            One flat tensor of the gradient's type, or the gradient itself where it is to be sent
            whole: outside the epilogue, if so set, and where compressed it is not smaller.

        Raises:
            TypeError: the gradient is of another type.
        """
        whole = not self._is_compressed(gradient.shape, in_epilogue, gradient.dtype)
        packed = gradient if whole else self._pack(gradient, stream)
        if whole and self.statistics is not None:
            self.statistics.sent_whole(stream)
        self._traffic.message(Kind.BACKWARD, packed, compressed=not whole)
        return packed

    def received_shape(
        self, shape: torch.Size, in_epilogue: bool, dtype: torch.dtype
    ) -> torch.Size:
        """Return the shape of what :meth:`compress` sends for a gradient."""
        if not self._is_compressed(shape, in_epilogue, dtype):
            return torch.Size(shape)
        return torch.Size([self._format.packed_numel(shape, dtype)])

    @torch.no_grad()
    def restore(self, received: Tensor, shape: torch.Size, in_epilogue: bool) -> Tensor:
        """Return the gradient that a received message stands for.

        Args:
            received: of :meth:`received_shape`.
            shape: of the gradient.
            in_epilogue: as the sender had it.

        Returns:
            The gradient, of ``shape``, in the type of ``received``.
        """
        if not self._is_compressed(shape, in_epilogue, received.dtype):
            return received
        return self._format.unpack(received, shape).to(received.dtype)

    def error(self, shape: torch.Size, stream: Hashable = 0) -> Tensor | None:
        """Return what the last compressed message of a stream left out, of ``shape``, fp32."""
        return self.memory.of("errors").get((stream, tuple(shape)))

    def state_dict(self) -> dict[str, Any]:
        """Return queries, if there are any, and errors."""
        return self.memory.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave."""
        self.memory.load_state_dict(state)

    def _is_compressed(self, shape: torch.Size, in_epilogue: bool, dtype: torch.dtype) -> bool:
        return self._settings.compresses_message(in_epilogue) and (
            self._format.packed_numel(shape, dtype) < torch.Size(shape).numel()
        )

    @torch.no_grad()
    def _pack(self, gradient: Tensor, stream: Hashable) -> Tensor:
        require_dtype(gradient)
        # A last, smaller batch has queries and errors of its own.
        key = (stream, tuple(gradient.shape))
        given = self._feedback.add(key, gradient)
        packed = self._format.pack(given, gradient.dtype, key)
        if self._feedback.enabled or self.statistics is not None:
            # The error is against what arrives, rounding to the message's type included.
            arriving = self._format.unpack(packed, gradient.shape)
            self._feedback.keep(key, given, arriving)
            if self.statistics is not None:
                self.statistics.sent(stream, gradient, given - arriving)
        return packed
