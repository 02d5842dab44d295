"""Waits of ZeRO-3's gathers for tiles of an update in flight."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from deep_optimizer_states.adapter.barrier import Barrier
from deep_optimizer_states.adapter.hooks import standing_barriers
from deep_optimizer_states.adapter.zero3.stock import Layout
from deep_optimizer_states.core.device.base import Device
from deep_optimizer_states.core.schedule import Schedule
from deep_optimizer_states.core.update_worker import UpdateWorker


class GatherBarrier(Barrier):
    """Lets a gather of a parameter through once that parameter's own tiles are updated.

    :func:`~deep_optimizer_states.install` makes the gathers of all engines of this process wait
    here; it needs nothing else of stock.
    """

    def __init__(
        self, background: UpdateWorker, lanes: Device, layout: Layout, schedule: Schedule
    ) -> None:
        runs = {ds_id: (run,) for ds_id, run in layout.slices.items()}
        super().__init__(background, lanes, schedule, runs, layout.separate)
        self._on_gather: Callable[[], None] = lambda: None

    def set_callback(self, on_gather: Callable[[], None]) -> None:
        """Call ``on_gather`` before each gather of parameters, once it may begin."""
        self._on_gather = on_gather

    def put_up(self) -> None:
        """Let every gather from now on wait at this barrier."""
        standing_barriers.add(self)

    def take_down(self) -> None:
        """Let every gather through."""
        standing_barriers.discard(self)

    @property
    def is_up(self) -> bool:
        """Whether gathers wait at it; if not, ``step()`` waits for the whole update."""
        return self in standing_barriers

    def retire(self) -> None:
        """Let every gather through once the update in flight has ended, however it does.

        Raises:
            UpdateError: It did not end in time.
        """
        self.take_down()
        update = self.background.update
        if update is not None and not update.is_open:
            self.background.wait_for_end()

    def before_gather(self, params: Iterable[Any]) -> None:
        """Wait for the tiles of ``params``; parameters of other engines are passed over."""
        own = [param.ds_id for param in params if param.ds_id in self._tiles_of]
        if own:
            self.background.check()
            self.use(own)
            self._on_gather()
