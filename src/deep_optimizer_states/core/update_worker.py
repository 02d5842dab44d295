"""The thread on which updates run, and what has failed.

[Note: failures] An update that failed, or that was cut short while it was being launched, leaves
optimizer state of two different steps behind. So its failure stays: every wait, step, save and read
of the state raises it again, until the state has been loaded anew. An update ends when its thread
says so, also if a thread that waited for it was interrupted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NoReturn

from deep_optimizer_states.core.device.base import WAIT_TIMEOUT_S, Device
from deep_optimizer_states.core.update import Update
from deep_optimizer_states.errors import UpdateError


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
        self._in_flight: Update | None = None
        self._failure: BaseException | None = None
        self._is_told = False
        self._under_way = ""
        self.update: Update | None = None
        self.overlooks_failure = False

    @property
    def is_running(self) -> bool:
        """Return whether an update is in flight."""
        return self._in_flight is not None and not self._in_flight.has_ended

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
        assert self._in_flight is None, "an update is in flight"
        update.on_end = self._note
        self.update = self._in_flight = update
        try:
            update.start(self._pool, run)
        except BaseException as error:
            update.end_unless_begun(error)
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
        if self._in_flight is None:
            return
        self._in_flight.wait_for_end()
        # Only now: whoever was interrupted above has not made the update end.
        self._in_flight = None

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
        assert self._in_flight is None, "an update is in flight"
        self._failure = None

    def close(self) -> None:
        """End the thread once what it runs has ended; a failure of that is dropped."""
        if self.update is not None:
            self.update.give_up(UpdateError("the engine is destroyed"))
        # No deadline: whatever the thread waits for has one.
        self._pool.shutdown(wait=True)
