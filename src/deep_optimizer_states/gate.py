"""Just-in-time forward: the update runs on while the next forward begins.

``step()`` launches the update on a thread of its own and returns. Whoever is about to gather a
parameter waits for that parameter's tiles alone, and whoever is about to overwrite a gradient waits
until the update has read it. Nothing is stale and nothing is rolled back: the model computes with
the weights that it would have had, only the waiting has moved to where they are needed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

from deep_optimizer_states.device.base import WAIT_TIMEOUT_S, Device, Event, Wait
from deep_optimizer_states.errors import UpdateError


class Update:
    """One step's update, perhaps still in flight.

    Args:
        num_tiles: Tiles that it will step.
    """

    def __init__(self, num_tiles: int) -> None:
        self._issued = [threading.Event() for _ in range(num_tiles)]
        self._events: list[Event | None] = [None] * num_tiles
        self._failure: BaseException | None = None

    def issued(self, tile: int, event: Event) -> None:
        """A tile's weights are written, and its gradient read, once ``event`` is reached."""
        self._events[tile] = event
        self._issued[tile].set()

    def end(self, failure: BaseException | None) -> None:
        """Open every gate; with a failure, each raises it."""
        self._failure = failure
        for gate in self._issued:
            gate.set()

    def wait(self, tiles: Iterable[int], device: Device, why: Wait) -> None:
        """Block until ``tiles`` are done.

        Raises:
            UpdateError: The update failed, or did not reach a tile in time.
        """
        if device.leaves_out(why):
            return
        for tile in tiles:
            if not self._issued[tile].wait(WAIT_TIMEOUT_S):
                raise UpdateError(
                    f"waited {WAIT_TIMEOUT_S:g} s for the update to reach tile {tile}"
                )
            if self._failure is not None:
                raise UpdateError(f"the update failed: {self._failure}") from self._failure
            event = self._events[tile]
            if event is not None:
                event.synchronize()


class Background:
    """The thread on which updates run, one at a time.

    Args:
        device: What the thread works on.
    """

    def __init__(self, device: Device) -> None:
        self._pool = ThreadPoolExecutor(
            1, "deep_optimizer_states/update", initializer=device.enter_thread
        )
        self._running: Future[None] | None = None

    def prepare(self, work: Callable[[], None]) -> None:
        """Run ``work`` on the thread, before any update."""
        self._pool.submit(work).result(WAIT_TIMEOUT_S)

    def launch(self, update: Update, run: Callable[[], None]) -> None:
        """Start an update; the one before must have been waited for."""
        assert self._running is None, "an update is in flight"
        self._running = self._pool.submit(_run_to_the_end, update, run)

    def wait(self) -> None:
        """Block until no update is in flight.

        Raises:
            UpdateError: It failed, or did not end in time.
        """
        running, self._running = self._running, None
        if running is None:
            return
        try:
            running.result(WAIT_TIMEOUT_S)
        except TimeoutError as error:
            raise UpdateError(f"waited {WAIT_TIMEOUT_S:g} s for the update to end") from error

    def close(self) -> None:
        """End the thread once what it runs has ended; a failure of that is dropped."""
        self._pool.shutdown(wait=True)


def _run_to_the_end(update: Update, run: Callable[[], None]) -> None:
    try:
        run()
    except BaseException as error:
        update.end(error)
        raise
    update.end(None)
