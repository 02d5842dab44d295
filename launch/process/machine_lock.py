"""One measurement at a time: runs of several drivers on one machine take turns.

The turn is the kernel's lock on one file of the machine. The kernel gives it back when its holder
ends in whatever way, so that no stale lock is ever left.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

LOCK_VARIABLE = "DOS_LOCK_FILE"
"""Environment variable with another path of the lock, such as one that containers share."""
LOOK_S = 0.5
"""Seconds between two tries; the kernel's own wait would keep signals from us."""


@contextlib.contextmanager
def turn(say: Callable[[str], object], share: bool = False) -> Iterator[None]:
    """Wait until nobody else measures on this machine; the block is our turn.

    ``say`` gets a line when we have to wait; ``share`` measures beside others instead.
    """
    lock = None if share else _open(say)
    if lock is None:
        yield
        return
    with lock:
        _wait(lock, say)
        yield


def _open(say: Callable[[str], object]) -> IO[bytes] | None:
    """The lock's file, made for all users; None, with a line of why, where it cannot be had."""
    given = os.environ.get(LOCK_VARIABLE)
    path = Path(given) if given else Path(tempfile.gettempdir()) / "deep-optimizer-states.lock"
    try:
        with contextlib.suppress(FileExistsError):
            # In /tmp the kernel may refuse to open for creation what another user has made.
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW))
            path.chmod(0o666)
        return os.fdopen(os.open(path, os.O_RDWR | os.O_NOFOLLOW), "r+b", buffering=0)
    except OSError as error:
        say(f"{path}: {error.strerror}; runs of others at the same time would not be noticed")
        return None


def _wait(lock: IO[bytes], say: Callable[[str], object]) -> None:
    waits = False
    # No deadline: runs of others may take days. It is said, with the way out.
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if not waits:
                say("waits for its turn: another call measures here; --share measures beside it")
            waits = True
            time.sleep(LOOK_S)
