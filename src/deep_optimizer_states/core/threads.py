"""Threads of ours, and what those who wait for one are told.

[Note: a thread that dies] Whatever ends the work of a thread, and be it that memory ran out in the
middle of its bookkeeping, somebody waits for what it was to do. So every thread of ours runs in
:func:`run_guarded`, which tells how the work ended, and tells it again if that failed. And whoever
waits looks now and then whether there is still somebody to wait for.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

LOOK_S = 0.2
"""Seconds between two looks of a thread that waits whether what it waits for can still come."""


def run_guarded(work: Callable[[], object], tell: Callable[[BaseException | None], object]) -> None:
    """Do the work of a thread of ours; see [Note: a thread that dies].

    Args:
        work: What the thread is for.
        tell: Called with what the work raised, or None. It is called once more if it raises, and so
            must bear to be.

    Raises:
        RuntimeError: ``tell`` raised, for Python to show.
    """
    failure: BaseException | None = None
    try:
        work()
    except BaseException as error:  # noqa: BLE001 - there is nobody else to raise it to
        failure = error
    try:
        tell(failure)
    except BaseException as error:
        tell(failure or error)
        # Python would show nothing of a SystemExit that ends a thread.
        raise RuntimeError(f"{threading.current_thread().name}: {error!r}") from error


class Latch:
    """Set once, by one thread; any others may wait for it.

    ``threading.Event`` holds a lock for a moment while somebody begins or ends to wait. A signal
    handler that runs in that moment and waits for the same event, say because it saves a
    checkpoint, would keep the lock from whoever is to set it, for ever. Here each wait has a lock
    of its own.

    Args:
        may_come: Whether somebody is there who may set it still; see [Note: a thread that dies].
    """

    def __init__(self, may_come: Callable[[], bool] = lambda: True) -> None:
        self.is_set = False
        self._may_come = may_come
        self._waiting: list[threading.Lock] = []

    def set(self) -> None:
        """Let everybody through."""
        self.is_set = True
        while self._waiting:
            self._waiting.pop().release()

    def wait(self, timeout_s: float) -> bool:
        """Block until it is set, at most so long, and not once nobody is there to set it.

        Returns:
            Whether it is set.
        """
        deadline = time.monotonic() + timeout_s
        own = threading.Lock()
        own.acquire(blocking=False)  # nobody else knows it yet
        self._waiting.append(own)
        # Looked at again: it may have been set before the lock was there to be released.
        while not self.is_set:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not self._may_come():
                break
            own.acquire(timeout=min(LOOK_S, left_s))
        return self.is_set
