"""One step's update: the tiles that it gets, and who waits for which of them.

``step()`` launches the update on a thread of its own and returns. A gather of a parameter waits for
that parameter's tiles alone, and a gradient is overwritten only after the update has read it. No
weight is stale and nothing is rolled back: the model computes with the same weights as without the
overlap. Only the place of the waiting has changed.

An update may begin before ``step()``. It gets tiles as backward ends with them, and the rest from
``step()``. Until then it is *open*: its thread waits for more tiles, the state is of two different
steps, and reading or using the state is refused.

Three kinds of threads meet here. The caller hands tiles over and closes the update, the update's
thread takes tiles and says which are done, and whoever needs a tile waits.
"""

from __future__ import annotations

import collections
import functools
import queue
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from deep_optimizer_states.core.cache import Place
from deep_optimizer_states.core.device.base import WAIT_TIMEOUT_S, Device, Event, Wait
from deep_optimizer_states.core.kernels.adam import AdamScalars, AdamTensors
from deep_optimizer_states.core.plan import Kind
from deep_optimizer_states.core.threads import LOOK_S, Latch, run_guarded
from deep_optimizer_states.errors import UpdateError

After = tuple[Event, Event]
"""Events that the steps of tiles wait for, as ``Executor.caller_events`` gives them."""


@dataclass(frozen=True)
class TileArgs:
    """All that the step of one tile needs.

    Attributes:
        name: Its name in errors.
        tensors: State, gradient and weights where they live.
        scalars: Adam's scalars.
        tail_start: First element rounded as a tail.
        place: Device memory of its own, if it has some.
    """

    name: str
    tensors: AdamTensors
    scalars: AdamScalars
    tail_start: int
    place: Place | None = None

    @property
    def live(self) -> AdamTensors:
        """Its tensors where the newest of each is, before the update and after it."""
        return self.tensors if self.place is None else self.place.live(self.tensors)


class Update:
    """One step's update, from its first tile to its end; the ``Arrivals`` of its schedule.

    Attributes:
        work: What each tile that was handed over needs; nothing once the update has ended with all.
        host_tiles: Tiles that must be stepped where their state lives.
        is_open: Whether it waits for more tiles.
        on_end: Called with what the update failed with, or None, before those who wait go on.

    Args:
        order: All tiles, in the order in which they are needed.
        chain_of: Gives the chain of a tile that has device memory of its own, nothing for others.
        follow: Called on the update's thread before tiles are stepped, with what they must wait
            for.
    """

    def __init__(
        self,
        order: Sequence[int],
        chain_of: Callable[[int], tuple[Kind, ...]],
        follow: Callable[[After], None],
    ) -> None:
        self.order = order
        self.chain_of = chain_of
        self.host_tiles: Collection[int] = frozenset()
        self.work: dict[int, TileArgs] = {}
        self.is_open = True
        self.on_end: Callable[[BaseException | None], None] = lambda failure: None
        self._follow = follow
        # The one queue of Python's that a signal handler may use in the middle of another use.
        self._queue: queue.SimpleQueue[tuple[Sequence[int], After | None] | UpdateError]
        self._queue = queue.SimpleQueue()
        self._pending: collections.deque[tuple[Sequence[int], After | None]] = collections.deque()
        self._has_come = False
        self._issued = [Latch(self._may_go_on) for _ in order]
        self._events: list[Event | None] = [None] * len(order)
        self._ended = Latch(self._may_go_on)
        self._failure: BaseException | None = None
        # Taken by the thread when it begins, or by who could not give it the work.
        self._claim = threading.Lock()
        self._future: Future[None] | None = None

    def give(self, work: Mapping[int, TileArgs], after: After) -> None:
        """Hand over tiles whose gradients are final and whose weights are no longer read."""
        self.work.update(work)
        self._queue.put((list(work), after))

    def give_rest(
        self,
        work: Mapping[int, TileArgs],
        after: After,
        host_tiles: Collection[int] = frozenset(),
    ) -> None:
        """Hand over the remaining tiles, once the norm is known.

        Args:
            work: All that were not handed over before.
            after: What they must wait for.
            host_tiles: Tiles that must be stepped where their state lives. Tiles already handed
                over keep their earlier placement; their gradient may be elsewhere.
        """
        self.host_tiles = frozenset(host_tiles) - self.work.keys()
        self.is_open = False
        try:
            self.give(work, after)
            self._queue.put(((), None))
        except BaseException as error:
            self._queue.put(UpdateError(f"its tiles could not be handed over: {error!r}"))
            raise

    def give_up(self, why: UpdateError) -> None:
        """Make it fail if it is open: no more tiles will come."""
        if self.is_open:
            self.is_open = False
            self._queue.put(why)

    def take(self, wait: bool) -> Iterable[int]:
        """Return the tiles handed over since the last call; runs on the update's thread.

        Args:
            wait: Block until there is one. An empty answer then means that all have come.

        Raises:
            UpdateError: It was given up, or the process is about to end.
        """
        if self._has_come:
            return ()
        found: list[int] = []
        while not found and not self._has_come:
            self._collect(wait and not self._pending)
            while self._pending:
                tiles, after = self._pending[0]
                # Return tiles that can be stepped at once before newer ones that must wait.
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
        return found

    def _collect(self, wait: bool) -> None:
        """Take what was put into the queue, at least one thing if told to wait for it."""
        # No deadline: step() may come as late as the user likes. Ending the engine ends this wait.
        while True:
            try:
                item = self._queue.get(wait, LOOK_S)
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

    def issued(self, tile: int, event: Event) -> None:
        """Note that a tile's weights are written, and its gradient read, once ``event`` is."""
        self._events[tile] = event
        self._issued[tile].set()

    def wait(self, tiles: Iterable[int], device: Device, why: Wait) -> None:
        """Block until ``tiles`` are done.

        Raises:
            UpdateError: The update failed, or did not reach a tile in time.
        """
        if device.leaves_out(why):
            return
        for tile in tiles:
            self._wait(self._issued[tile], f"reach tile {tile}")
            if self._failure is not None:
                raise UpdateError(f"the update failed: {self._failure}") from self._failure
            event = self._events[tile]
            if event is not None:
                event.synchronize()

    def wait_for_end(self) -> None:
        """Block until it has ended, however it did.

        Raises:
            UpdateError: It did not end in time.
        """
        self._wait(self._ended, "end")

    @property
    def has_ended(self) -> bool:
        """Return whether nothing of it is in flight any more."""
        return self._ended.is_set

    def start(self, pool: ThreadPoolExecutor, run: Callable[[], None]) -> None:
        """Do ``run``, which takes the tiles and steps them, on the thread of ``pool``."""
        self._future = pool.submit(run_guarded, functools.partial(self._begin, run), self._end)

    def end_unless_begun(self, why: BaseException) -> None:
        """End it where its thread could not be given the work."""
        if self._claim.acquire(blocking=False):
            self._end(why)

    def _begin(self, run: Callable[[], None]) -> None:
        if self._claim.acquire(blocking=False):
            run()

    def _end(self, failure: BaseException | None) -> None:
        """Let everybody through; with a failure, each who waits raises it."""
        self.on_end(failure)
        self._failure = failure
        if not self.is_open:  # nobody asks for it any more, and it holds device memory
            self.work = {}
        for latch in (*self._issued, self._ended):
            latch.set()

    def _wait(self, latch: Latch, what: str) -> None:
        if latch.wait(WAIT_TIMEOUT_S):
            return
        if not self._may_go_on():  # end it in place of its thread, which has told nobody
            assert self._future is not None, "nobody has it"
            error = self._future.exception()
            self._end(error or UpdateError("its thread has ended without a word"))
        if not latch.is_set:
            raise UpdateError(f"waited {WAIT_TIMEOUT_S:g} s for the update to {what}")

    def _may_go_on(self) -> bool:
        return self._ended.is_set or self._future is None or not self._future.done()


def _is_process_ending() -> bool:
    # Python's own flag comes before it joins threads; the main thread ends only after that.
    return bool(getattr(threading, "_SHUTTING_DOWN", False))
