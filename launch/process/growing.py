"""Files that others append to, such as logs, read piece by piece."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

from launch.process.members import POLL_S

MOST_BYTES = 2**20
"""Most that one look reads; of a larger growth, the end."""


class GrowingFile:
    """Hands out what was appended since the last look."""

    def __init__(self, path: Path, start: int = 0) -> None:
        """Read from byte ``start`` on; the file need not be there yet."""
        self._path = path
        self._position = start
        self._part = b""
        self.has_grown = False
        """Whether the last look found anything new."""

    def new_lines(self) -> list[bytes]:
        """Whole lines since the last call."""
        self.has_grown = False
        try:
            size = self._path.stat().st_size
            if size == self._position:
                return []
            self.has_grown = True
            with self._path.open("rb") as file:
                if size - self._position > MOST_BYTES or size < self._position:
                    self._part = b""
                    self._position = max(0, size - MOST_BYTES)
                file.seek(self._position)
                text = file.read(MOST_BYTES)
        except OSError:  # not made yet, or a file system that has gone for a while
            return []
        self._position += len(text)
        *lines, self._part = (self._part + text).split(b"\n")
        return lines


@contextlib.contextmanager
def meanwhile(work: Callable[[threading.Event], None]) -> Iterator[None]:
    """Do ``work`` on a thread until the block ends, which sets the event that it is given."""
    ended = threading.Event()
    thread = threading.Thread(target=work, args=(ended,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def echoing(log: Path) -> AbstractContextManager[None]:
    """Copy what is appended to ``log`` to standard output until the block ends."""
    return meanwhile(partial(_copy_log, log, log.stat().st_size))


def _copy_log(log: Path, start: int, ended: threading.Event) -> None:
    with log.open("rb") as file, open(sys.stdout.fileno(), "wb", closefd=False) as output:
        file.seek(start)
        while True:
            last = ended.is_set()  # looked at before the read: nothing is written after the end
            try:
                shutil.copyfileobj(file, output)
                output.flush()
            except BrokenPipeError:
                # The reader has gone (`| head`); the run goes on without it.
                os.dup2(os.open(os.devnull, os.O_WRONLY), output.fileno())
                return
            if last:
                return
            ended.wait(POLL_S)
