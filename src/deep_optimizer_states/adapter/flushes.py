"""Gradients on their way from backward to where they are kept, on the ``grads`` lane."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from deep_optimizer_states.core.cache import copy_all
from deep_optimizer_states.core.device.base import Device, Event, PendingBytes, Wait
from deep_optimizer_states.errors import UpdateError


class Flushes:
    """Sends gradients home, or to the places of cached tiles, and bounds how many are under way.

    Attributes:
        have_failed: Whether somebody who waited for them heard that one has not arrived.

    Args:
        lanes: What they are sent on.
        most_bytes: How many may be under way, before the oldest is waited for.
    """

    def __init__(self, lanes: Device, most_bytes: int) -> None:
        self._lanes = lanes
        self._pending = PendingBytes(most_bytes)
        self._is_closed = False
        self.have_failed = False

    def send(self, name: str, value: Tensor, homes: Sequence[Tensor]) -> Event:
        """Send a gradient that backward has just made.

        Args:
            name: Of the parameter, in errors.
            value: The gradient, 1-D; nobody else writes to it.
            homes: Where it is kept, in pieces.

        Returns:
            When it is there.
        """
        parts, lane = torch.split(value, [home.numel() for home in homes]), self._lanes.grads
        lane.wait(self._lanes.record_caller(), Wait.GRAD_READY)
        lane.submit(f"gradient flush of {name}", lambda: copy_all(homes, parts), uses=(value,))
        sent = lane.record()
        self._pending.add(sent, value.nbytes)
        return sent

    def drain(self) -> None:
        """Wait until all have arrived.

        Raises:
            UpdateError: One has not.
        """
        if self._is_closed:
            return
        try:
            self._lanes.grads.record().synchronize()
        except UpdateError:
            self.have_failed = True
            raise

    def forget(self) -> None:
        """Forget those of a window that is given up, and that one of them failed."""
        if not self._is_closed:
            self._lanes.grads.forget_failure()
        self._pending.clear()
        self.have_failed = False

    def close(self) -> None:
        """Stop waiting for any: the lanes are about to end."""
        self._is_closed = True
