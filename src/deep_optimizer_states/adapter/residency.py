"""When state comes to the device and goes home: in step with forwards, backwards and updates.

The cache (``core/cache.py``) is asked for nothing but what is asked for here, and by whoever looks
at state (``InterleavedOptimizer``). An allocation of the user's that fails cannot be caught before
it does. So the memory is looked at wherever a layer is about to take some: at stage 3 at every
gather, below it before the forward of every module that owns parameters, and in backward wherever a
gradient has come.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import Module, TransformerEncoderLayer

from deep_optimizer_states.adapter.in_flight import ModuleHook, hookable
from deep_optimizer_states.adapter.launcher import UpdateLauncher
from deep_optimizer_states.core.update_worker import UpdateWorker


class Residency:
    """Fills the cache of a rank while there is room, and empties it where others need the memory.

    Args:
        launcher: Whose cache it is.
        background: The thread of updates, which own the places of their tiles while they run.
    """

    def __init__(self, launcher: UpdateLauncher, background: UpdateWorker) -> None:
        self._launcher = launcher
        self._cache = launcher.cache
        self._background = background

    def begin_forward(self) -> None:
        """Give back the memory of state ahead of the update, which a forward needs."""
        self.drop()

    def begin_window(self) -> None:
        """Begin a window: ``step()`` is over."""
        self.drop()
        self._cache.begin_window()

    def look(self) -> None:
        """See that others have the memory that they need, which a layer takes too."""
        if not self._cache.look():
            return
        if self._background.is_running and not self._launcher.is_begun:
            self._background.wait()  # what the update has is free once it has ended
        with self._background.changing("giving device memory back"):
            self._cache.relieve()

    def in_backward(self, ends_window: bool) -> None:
        """Look at the memory where a gradient has come, and prefetch state into what is free.

        Args:
            ends_window: Whether an update follows this backward.
        """
        self.look()
        # Before the first update nobody knows what it needs, and the last one may still flush.
        if ends_window and self._launcher.num_updates and not self._background.is_running:
            with self._background.changing("backward"):
                self.send_ahead(self._launcher.order)

    def send_ahead(self, order: Sequence[int]) -> None:
        """Prefetch state of the tiles that come first in ``order``."""
        self._cache.send_ahead(order, self._launcher.has_given)

    def drop(self) -> None:
        """Forget what was sent ahead and may not stay: nobody is about to step."""
        self._cache.drop_passing()


class LooksInForward:
    """Calls ``look`` before the forward of every module of a model that owns parameters."""

    def __init__(self, model: Module, look: Callable[[], None]) -> None:
        hook = _Look(look)
        self._hooks = [
            module.register_forward_pre_hook(hook)
            for module in hookable(model)
            # What is below torch's encoder layers has no hook, so who contains one looks for it.
            if module._parameters
            or any(isinstance(part, TransformerEncoderLayer) for part in module.modules())
        ]

    def take_down(self) -> None:
        """Leave nothing behind in the model."""
        for hook in self._hooks:
            hook.remove()


class _Look(ModuleHook):
    def __init__(self, look: Callable[[], None]) -> None:
        self._look = look

    def __call__(self, _module: Module, _args: Any) -> None:
        # A compiler would make the look a part of the model, and a transform forbids the copies.
        if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
            return
        self._look()
