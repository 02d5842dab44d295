"""Tiles handed over to an update that has begun before ``step()``, as backward ends with them.

``step()`` hands over the rest. Until then the update is *open*: its thread waits for more, state is
of two different steps, and whoever would look at it or use it is refused.
"""

from __future__ import annotations

import collections
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence

from deep_optimizer_states.device.base import Event
from deep_optimizer_states.errors import UpdateError

POLL_S = 0.2
"""How often a thread that waits for tiles looks whether the process is about to end, in seconds."""
After = tuple[Event, Event]
"""What the steps of tiles must wait for, as ``Executor.caller_events`` gave it."""
OnWait = Callable[[float, float], None]
"""Told from when to when, in s, a thread waited for tiles."""


class Handover:
    """What an update may step by now; the ``Arrivals`` of its schedule.

    Args:
        order: All tiles, those first that are needed first.
        ahead: Tiles whose state was sent to the device ahead of the update, kept up to date.
        follow: Called on the update's thread before tiles are stepped, with what they must wait
            for.
        on_wait: See :data:`OnWait`.
    """

    def __init__(
        self,
        order: Sequence[int],
        ahead: Collection[int],
        follow: Callable[[After], None],
        on_wait: OnWait = lambda begin_s, end_s: None,
    ) -> None:
        self.order = order
        self.ahead = ahead
        self.host_tiles: Collection[int] = frozenset()
        self.given: set[int] = set()
        self.is_open = True
        self._follow = follow
        self._on_wait = on_wait
        # The one queue of Python's that a signal handler may use in the middle of another use.
        self._queue: queue.SimpleQueue[tuple[Sequence[int], After | None] | UpdateError]
        self._queue = queue.SimpleQueue()
        self._pending: collections.deque[tuple[Sequence[int], After | None]] = collections.deque()
        self._has_come = False

    def give(self, tiles: Iterable[int], after: After) -> None:
        """Hand tiles over whose gradients are final and whose weights nobody reads any more."""
        fresh = list(tiles)
        self.given.update(fresh)
        self._queue.put((fresh, after))

    def give_rest(self, after: After, host_tiles: Collection[int] = frozenset()) -> None:
        """Hand over all that are left: the norm is known.

        Args:
            after: What they must wait for.
            host_tiles: Tiles that must be stepped where their state lives. Those that were given
                before keep to what was said of them then: their gradient may be elsewhere.
        """
        self.host_tiles = frozenset(host_tiles) - self.given
        self.is_open = False
        self.give([tile for tile in self.order if tile not in self.given], after)
        self._queue.put(((), None))

    def give_up(self, why: UpdateError) -> None:
        """No more will come, and the update is to fail."""
        self._queue.put(why)

    def take(self, wait: bool) -> Iterable[int]:
        """Those handed over since the last call, see ``Arrivals``; on the update's thread.

        Raises:
            UpdateError: It was given up, or the process is about to end.
        """
        if self._has_come:
            return ()
        begin_s = time.perf_counter()
        found: list[int] = []
        while not found and not self._has_come:
            self._collect(wait and not self._pending)
            while self._pending:
                tiles, after = self._pending[0]
                # Rather those that can be stepped at once than newer ones that must be waited for.
                if after is not None and (found or not wait) and not after[1].reached():
                    break
                self._pending.popleft()
                if after is None:
                    self._has_come = True
                else:
                    self._follow(after)
                    found += tiles
            if not wait:
                break
        if wait:
            self._on_wait(begin_s, time.perf_counter())
        return found

    def _collect(self, wait: bool) -> None:
        """Take what was put into the queue, at least one thing if told to wait for it."""
        while True:
            try:
                item = self._queue.get(wait, POLL_S)
            except queue.Empty:
                if not wait:
                    return
                if _is_process_ending():
                    # Python joins this thread before it ends, and nobody is left to hand over more.
                    raise UpdateError("the process ends between backward and step()") from None
                continue
            if isinstance(item, UpdateError):
                raise item
            self._pending.append(item)
            wait = False


def _is_process_ending() -> bool:
    # Python's own flag comes before it joins threads; the main thread ends only after that.
    return bool(getattr(threading, "_SHUTTING_DOWN", False))
