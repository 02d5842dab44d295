"""Waits of ZeRO-3's gathers for tiles of an update in flight.

[Note: first use] ``step()`` gathers persistent parameters (norms, biases) before it returns. They
lie between all others, so they get tiles of their own, which are updated first. The order in which
the other tiles are needed is the order of the gathers in the first iteration after an update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from deep_optimizer_states.adapter.hooks import standing_barriers
from deep_optimizer_states.adapter.zero3.stock import Layout
from deep_optimizer_states.config import STEP_BEFORE_NORM
from deep_optimizer_states.core.device.base import Device, Wait
from deep_optimizer_states.core.schedule import Schedule
from deep_optimizer_states.core.update_worker import UpdateWorker
from deep_optimizer_states.errors import UpdateError

_TOO_EARLY = {
    Wait.WEIGHTS_READY: "between backward and engine.step() weights were gathered that backward "
    "has updated: call engine.step() before the next forward; if nothing but backward ran, the "
    "model uses a weight in a way that its gradient does not know of: set "
    f'"{STEP_BEFORE_NORM}" to false',
    Wait.GRAD_READ: "a gradient came after backward had updated its parameter: with "
    f'"{STEP_BEFORE_NORM}" the last micro-batch of a window must have one backward, in which no '
    "parameter gets its gradient twice; set it to false",
}
"""Raised instead of a wait that would deadlock on an open update."""


class GatherBarrier:
    """Lets a gather of a parameter through once that parameter's own tiles are updated.

    It owns the order in which tiles are used. :func:`~deep_optimizer_states.install` makes the
    gathers of all engines of this process wait here; it needs nothing else of stock.
    """

    def __init__(
        self, background: UpdateWorker, lanes: Device, layout: Layout, schedule: Schedule
    ) -> None:
        self.background = background
        self._lanes = lanes
        self._layout = layout
        self._schedule = schedule
        self._tiles_of = {id_: schedule.tiles_of(run) for id_, run in layout.slices.items()}
        self._on_gather: Callable[[], None] = lambda: None
        self._uses: dict[int, None] | None = None
        self._order: tuple[int, ...] | None = None

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
        for ds_id in own:
            if self._uses is not None:
                self._uses.setdefault(ds_id)
            self.wait_for(ds_id, Wait.WEIGHTS_READY)
        if own:
            self._on_gather()

    def wait_for(self, ds_id: int, why: Wait) -> None:
        """Wait until the update in flight is done with a parameter."""
        tiles, update = self._tiles_of.get(ds_id), self.background.update
        # Read only once: a signal handler that saves may end the update at any point from here.
        if update is None or tiles is None:
            return
        tile_queue = update.tile_queue
        if tile_queue is None or not tile_queue.is_open:
            update.wait(tiles, self._lanes, why)
        elif not tile_queue.handed_over.isdisjoint(tiles):
            self.background.fail(UpdateError(_TOO_EARLY[why]))

    @property
    def knows_order(self) -> bool:
        """True once it has seen in which order parameters are used."""
        return self._order is not None and self._uses is None

    def next_order(self) -> tuple[int, ...]:
        """Return the order of an update's tiles: those of ``step()`` first, later as used."""
        if self._order is None:
            self._order, self._uses = self._schedule.order_of_use(self._layout.separate), {}
        elif self._uses is not None:
            runs = [self._layout.slices[ds_id] for ds_id in self._uses]
            self._order, self._uses = self._schedule.order_of_use(runs), None
        return self._order
