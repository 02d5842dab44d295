"""An event that a signal handler may wait for in the middle of another wait for it."""

from __future__ import annotations

import threading


class Latch:
    """Set once, by one thread; any others may wait for it.

    ``threading.Event`` holds a lock for a moment while somebody begins or ends to wait. A signal
    handler that runs in that moment and waits for the same event, say because it saves a
    checkpoint, would keep the lock from whoever is to set it, for ever. Here each wait has a lock
    of its own.
    """

    def __init__(self) -> None:
        self.is_set = False
        self._waiting: list[threading.Lock] = []

    def set(self) -> None:
        """Let everybody through."""
        self.is_set = True
        while self._waiting:
            self._waiting.pop().release()

    def wait(self, timeout_s: float) -> bool:
        """Block until it is set, at most so long; returns whether it is."""
        if self.is_set:
            return True
        own = threading.Lock()
        own.acquire()
        self._waiting.append(own)
        # Looked at again: it may have been set before the lock was there to be released.
        return self.is_set or own.acquire(timeout=timeout_s)
