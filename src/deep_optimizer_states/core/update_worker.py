"""Updates that overlap with the next forward: their thread, the waits for them, their tiles.

``step()`` launches the update on a thread of its own and returns. A gather of a parameter waits for
that parameter's tiles alone, and a gradient is overwritten only after the update has read it. No
weight is stale and nothing is rolled back: the model computes with the same weights as without the
overlap. Only the place of the waiting has changed.

An update may begin before ``step()``. It gets tiles as backward ends with them, and the rest from
``step()``. Until then it is *open*: its thread waits for more tiles, the state is of two different
steps, and reading or using the state is refused.

[Note: failures] An update that failed, or that was cut short while it was being launched, leaves
optimizer state of two different steps behind. So its failure stays: every wait, step, save and read
of the state raises it again, until the state has been loaded anew. An update ends when its thread
says so, also if a thread that waited for it was interrupted.
"""

from __future__ import annotations

import collections
import contextlib
import queue
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NoReturn

from deep_optimizer_states.core.device.base import WAIT_TIMEOUT_S, Device, Event, Wait
from deep_optimizer_states.core.plan import Kind
from deep_optimizer_states.core.threads import LOOK_S, Latch, run_guarded
from deep_optimizer_states.errors import UpdateError

After = tuple[Event, Event]
"""Events that the steps of tiles wait for, as ``Executor.caller_events`` gives them."""


class TileQueue:
    """Queue of the tiles that an update may step now; the ``Arrivals`` of its schedule.

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
        self.handed_over: set[int] = set()
        self.is_open = True
        self._follow = follow
        # The one queue of Python's that a signal handler may use in the middle of another use.
        self._queue: queue.SimpleQueue[tuple[Sequence[int], After | None] | UpdateError]
        self._queue = queue.SimpleQueue()
        self._pending: collections.deque[tuple[Sequence[int], After | None]] = collections.deque()
        self._has_come = False

    def give(self, tiles: Iterable[int], after: After) -> None:
        """Hand over tiles whose gradients are final and whose weights are no longer read."""
        fresh = list(tiles)
        self.handed_over.update(fresh)
        self._queue.put((fresh, after))

    def give_rest(self, after: After, host_tiles: Collection[int] = frozenset()) -> None:
        """Hand over the remaining tiles, once the norm is known.

        Args:
            after: What they must wait for.
            host_tiles: Tiles that must be stepped where their state lives. Tiles already handed
                over keep their earlier placement; their gradient may be elsewhere.
        """
        self.host_tiles = frozenset(host_tiles) - self.handed_over
        self.is_open = False
        try:
            self.give([tile for tile in self.order if tile not in self.handed_over], after)
            self._queue.put(((), None))
        except BaseException as error:
            self._queue.put(UpdateError(f"its tiles could not be handed over: {error!r}"))
            raise

    def give_up(self, why: UpdateError) -> None:
        """Make the update fail if it is open: no more tiles will come."""
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


def _is_process_ending() -> bool:
    # Python's own flag comes before it joins threads; the main thread ends only after that.
    return bool(getattr(threading, "_SHUTTING_DOWN", False))


class Update:
    """One step's update, perhaps still in flight.

    Attributes:
        run: It on its thread, once it has begun.
    """

    def __init__(self, num_tiles: int, tile_queue: TileQueue | None = None) -> None:
        self.tile_queue = tile_queue
        self.run: _Run | None = None
        self._issued = [Latch(lambda: not self._is_lost()) for _ in range(num_tiles)]
        self._events: list[Event | None] = [None] * num_tiles
        self._failure: BaseException | None = None

    @property
    def is_open(self) -> bool:
        """Return whether it has begun before ``step()``, and waits for more tiles."""
        return self.tile_queue is not None and self.tile_queue.is_open

    def give_up(self, why: UpdateError) -> None:
        """Make it fail if it is open."""
        if self.tile_queue is not None:
            self.tile_queue.give_up(why)

    def issued(self, tile: int, event: Event) -> None:
        """Note that a tile's weights are written, and its gradient read, once ``event`` is."""
        self._events[tile] = event
        self._issued[tile].set()

    def end(self, failure: BaseException | None) -> None:
        """Let everybody through; with a failure, each who waits raises it."""
        self._failure = failure
        for latch in self._issued:
            latch.set()

    def _is_lost(self) -> bool:
        return self.run is not None and self.run.is_lost()

    def wait(self, tiles: Iterable[int], device: Device, why: Wait) -> None:
        """Block until ``tiles`` are done.

        Raises:
            UpdateError: The update failed, or did not reach a tile in time.
        """
        if device.leaves_out(why):
            return
        for tile in tiles:
            if not self._issued[tile].wait(WAIT_TIMEOUT_S):
                if self.run is None or not self._is_lost():
                    raise UpdateError(
                        f"waited {WAIT_TIMEOUT_S:g} s for the update to reach tile {tile}"
                    )
                self.run.end_lost()
            if self._failure is not None:
                raise UpdateError(f"the update failed: {self._failure}") from self._failure
            event = self._events[tile]
            if event is not None:
                event.synchronize()


class _Run:
    """An update on its thread, until it has ended."""

    def __init__(
        self, update: Update, run: Callable[[], None], note: Callable[[BaseException | None], None]
    ) -> None:
        self.ended = Latch(lambda: not self.is_lost())
        self._update = update
        self._work = run
        self._note = note
        # Taken by the thread when it begins, or by who could not give it the work.
        self._claim = threading.Lock()
        self._future: Future[None] | None = None
        update.run = self

    def start(self, pool: ThreadPoolExecutor) -> None:
        self._future = pool.submit(run_guarded, self._work_if_wanted, self._end)

    def give_up(self, why: BaseException) -> None:
        """End it where its thread could not be given the work."""
        if self._claim.acquire(blocking=False):
            self._end(why)

    def wait(self) -> None:
        if self.ended.wait(WAIT_TIMEOUT_S):
            return
        if not self.is_lost():
            raise UpdateError(f"waited {WAIT_TIMEOUT_S:g} s for the update to end")
        self.end_lost()

    def is_lost(self) -> bool:
        """Return whether its thread is through with it, and has told nobody."""
        return not self.ended.is_set and self._future is not None and self._future.done()

    def end_lost(self) -> None:
        """End it in its thread's place."""
        assert self._future is not None, "it is not lost"
        self._end(self._future.exception() or UpdateError("its thread has ended without a word"))

    def _work_if_wanted(self) -> None:
        if self._claim.acquire(blocking=False):
            self._work()

    def _end(self, failure: BaseException | None) -> None:
        self._note(failure)
        self._update.end(failure)
        self.ended.set()


class UpdateWorker:
    """The thread on which updates run, one at a time. See [Note: failures].

    Attributes:
        update: The last one, unless all of it has been waited for.
        overlooks_failure: Whether state is looked at to be replaced, whatever became of it.

    Args:
        device: What the thread works on.
    """

    def __init__(self, device: Device) -> None:
        self._pool = ThreadPoolExecutor(
            1, "deep_optimizer_states/update", initializer=device.enter_thread
        )
        self._run: _Run | None = None
        self._failure: BaseException | None = None
        self._is_told = False
        self._under_way = ""
        self.update: Update | None = None
        self.overlooks_failure = False

    @property
    def is_running(self) -> bool:
        """Return whether an update is in flight."""
        return self._run is not None and not self._run.ended.is_set

    @property
    def is_under_way(self) -> bool:
        """Return whether something is being done in the middle of which nothing may be saved."""
        return bool(self._under_way)

    @property
    def has_failed(self) -> bool:
        """Return whether a failure is known that no loading has made good yet."""
        return self._failure is not None

    @property
    def untold_failure(self) -> BaseException | None:
        """Return the failure that is known and that nobody has been told of."""
        return None if self._is_told else self._failure

    def prepare(self, work: Callable[[], None]) -> None:
        """Run ``work`` on the thread, before any update."""
        try:
            self._pool.submit(work).result(WAIT_TIMEOUT_S)
        except TimeoutError:
            raise UpdateError(
                f"waited {WAIT_TIMEOUT_S:g} s for the thread of updates to begin"
            ) from None

    @contextlib.contextmanager
    def under_way(self, what: str) -> Iterator[None]:
        """Do something in the middle of which nothing may be saved; ``what`` names it."""
        self._under_way = what
        try:
            yield
        finally:
            self._under_way = ""

    @contextlib.contextmanager
    def changing(self, what: str, has_changed: Callable[[], bool] = lambda: True) -> Iterator[None]:
        """Do something that leaves wrong state behind when it is cut short.

        Args:
            what: Its name in errors.
            has_changed: Whether something is wrong by now, asked where it was cut short.
        """
        try:
            yield
        except BaseException as error:
            if has_changed():
                is_named = isinstance(error, UpdateError)
                self._note(error if is_named else UpdateError(f"{what} was cut short by {error!r}"))
                self._is_told = True
            raise

    def refuse_to_save(self) -> None:
        """Refuse a signal handler that saves in the middle of what it interrupted.

        Raises:
            UpdateError: State and counters are being changed.
        """
        if self._under_way:
            raise UpdateError(
                f"state cannot be saved in the middle of {self._under_way}, which a signal handler "
                "has interrupted: let the handler set a flag, and save after engine.step()"
            )

    def refuse_while_open(self) -> None:
        """Refuse to read or save state, or to replace a part of it, while it is half updated.

        Raises:
            UpdateError: An update has begun before ``step()``; it goes on unharmed.
        """
        if self.update is not None and self.update.is_open:
            raise UpdateError(
                "state cannot be read, saved or loaded in part between backward and engine.step(): "
                'with "deep_optimizer_states.step_before_norm" some of it has been updated '
                "already. Do it after engine.step(), or set "
                '"deep_optimizer_states.step_before_norm" to false'
            )

    def launch(self, update: Update, run: Callable[[], None]) -> None:
        """Start an update; the one before must have been waited for."""
        assert self._run is None, "an update is in flight"
        begun = _Run(update, run, self._note)
        self.update, self._run = update, begun
        try:
            begun.start(self._pool)
        except BaseException as error:
            begun.give_up(error)
            raise

    def _note(self, failure: BaseException | None) -> None:
        if self._failure is None:
            self._failure, self._is_told = failure, False

    def wait(self) -> None:
        """Block until all state is where it lives.

        Raises:
            UpdateError: An update failed and nothing has been loaded since, or it did not end in
                time; or it has begun before ``step()`` and waits for more gradients.
        """
        if not self.overlooks_failure:
            self.refuse_while_open()
        self.wait_for_end()
        self.check()
        self.update = None

    @contextlib.contextmanager
    def overlooking_failure(self) -> Iterator[None]:
        """Wait for the update in flight, and overlook for a while how it and others ended."""
        self.wait_for_end()
        before, self.overlooks_failure = self.overlooks_failure, True
        try:
            yield
        finally:
            self.overlooks_failure = before

    def fail(self, error: UpdateError) -> NoReturn:
        """Make the update that is open fail, and raise ``error``."""
        self._note(error)
        self._is_told = True
        if self.update is not None:
            self.update.give_up(error)
        raise error

    def wait_for_end(self) -> None:
        """Block until no update is in flight, however it ended; one that is open fails.

        Raises:
            UpdateError: It did not end in time; it counts as in flight still.
        """
        if self.update is not None:
            self.update.give_up(UpdateError("given up between backward and engine.step()"))
        if self._run is None:
            return
        self._run.wait()
        # Only now: whoever was interrupted above has not made the update end.
        self._run = None

    def check(self) -> None:
        """Raise the failure that is known, unless it is overlooked, without waiting."""
        if self._failure is not None and not self.overlooks_failure:
            self._is_told = True
            raise UpdateError(
                f"{self._failure}. The optimizer state is not to be trusted, so it is neither "
                "trained on nor saved: go back to the last checkpoint (engine.load_checkpoint with "
                "its optimizer states, in this process or in a new one)"
            ) from self._failure

    def forget_failure(self) -> None:
        """Go on: the state has been loaded anew, and no update is in flight."""
        assert self._run is None, "an update is in flight"
        self._failure = None

    def close(self) -> None:
        """End the thread once what it runs has ended; a failure of that is dropped."""
        if self.update is not None:
            self.update.give_up(UpdateError("the engine is destroyed"))
        # No deadline: whatever the thread waits for has one.
        self._pool.shutdown(wait=True)
