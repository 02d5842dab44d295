"""Error feedback: what a compressed message left out is added to the next one.

Lazy error propagation is this, applied to the activation gradients of successive micro-batches:
``M_i + e_{i-1}`` is compressed, and ``e_i`` is what of it was not sent. The sum of what was sent
and of the error that is left is always the sum of what was given.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor


class ErrorFeedback:
    """The errors of any number of streams of messages, in fp32.

    They are kept in fp32 for bf16 messages too: an error is a small difference, and rounding it to
    eight bits would lose again what it is to save.
    """

    def __init__(self, enabled: bool) -> None:
        """Start without errors; when not ``enabled``, none is ever kept."""
        self.enabled = enabled
        self._errors: dict[Hashable, Tensor] = {}

    def add(self, key: Hashable, message: Tensor) -> Tensor:
        """The message with the error of the stream's last one, fp32.

        Args:
            key: the stream.
            message: any shape, the same for every message of a stream; it is not changed.
        """
        exact = message.float()
        error = self._errors.get(key)
        return exact if error is None else exact + error

    def keep(self, key: Hashable, given: Tensor, sent: Tensor) -> None:
        """Remember what was not sent.

        Args:
            key: the stream.
            given: what :meth:`add` returned.
            sent: what the receiver makes of the message, of that shape, fp32. Where the difference
                is not finite nothing is remembered, or one overflow would spoil all that follows.
        """
        if self.enabled:
            self._errors[key] = torch.nan_to_num(given - sent, nan=0.0, posinf=0.0, neginf=0.0)

    def error(self, key: Hashable) -> Tensor | None:
        """The stream's error, fp32; None before its first message."""
        return self._errors.get(key)

    def state_dict(self) -> dict[str, Any]:
        """The errors, to go on as if training had not stopped."""
        return {"errors": dict(self._errors)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave."""
        self._errors = dict(state["errors"])
