"""Waits for the tiles of a parameter, and the order in which parameters are needed.

[Note: first use] What ``step()`` itself needs before it returns has tiles of its own, which are
updated first: at stage 3 the persistent parameters (norms, biases), which it gathers. The order in
which the other tiles are needed is that of the first iteration after an update.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from deep_optimizer_states.config import STEP_BEFORE_NORM
from deep_optimizer_states.core.device.base import Device, Wait
from deep_optimizer_states.core.plan import Tile
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


class Barrier:
    """Lets whoever needs a parameter through once that parameter's own tiles are updated.

    It owns the order in which tiles are used.

    Args:
        background: The thread of updates.
        lanes: What the updates run on.
        schedule: The tiles.
        runs: Parameter, by a number of the caller's -> its elements, a run for each subgroup.
        first: Elements that ``step()`` itself needs.
    """

    def __init__(
        self,
        background: UpdateWorker,
        lanes: Device,
        schedule: Schedule,
        runs: Mapping[int, Sequence[Tile]],
        first: Sequence[Tile] = (),
    ) -> None:
        self.background = background
        self._lanes = lanes
        self._schedule = schedule
        self._runs = runs
        self._first = first
        self._tiles_of = {
            key: [tile for run in own for tile in schedule.tiles_of(run)]
            for key, own in runs.items()
        }
        self._uses: dict[int, None] | None = None
        self._order: tuple[int, ...] | None = None

    def use(self, keys: Iterable[int]) -> None:
        """Wait until parameters may be read, and note in which order they are.

        Raises:
            UpdateError: The update failed.
        """
        for key in keys:
            if self._uses is not None:
                self._uses.setdefault(key)
            self.wait_for(key, Wait.WEIGHTS_READY)

    def wait_for(self, key: int, why: Wait) -> None:
        """Wait until the update in flight is done with a parameter."""
        tiles, update = self._tiles_of.get(key), self.background.update
        # Read only once: a signal handler that saves may end the update at any point from here.
        if update is None or tiles is None:
            return
        if not update.is_open:
            update.wait(tiles, self._lanes, why)
        elif not update.work.keys().isdisjoint(tiles):
            self.background.fail(UpdateError(_TOO_EARLY[why]))

    @property
    def knows_order(self) -> bool:
        """True once it has seen in which order parameters are used."""
        return self._order is not None and self._uses is None

    def next_order(self) -> tuple[int, ...]:
        """Return the order of an update's tiles: those of ``step()`` first, later as used."""
        if self._order is None:
            self._order, self._uses = self._schedule.order_of_use(self._first), {}
        elif self._uses is not None:
            runs = [run for key in self._uses for run in self._runs[key]]
            self._order, self._uses = self._schedule.order_of_use(runs), None
        return self._order
