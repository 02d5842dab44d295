"""Copies a growing log to the terminal."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from launch.process.members import POLL_S


@contextlib.contextmanager
def echoing(log: Path) -> Iterator[None]:
    """Copy what is appended to ``log`` to standard output until the block ends."""
    ended = threading.Event()
    start = log.stat().st_size
    thread = threading.Thread(target=_copy_log, args=(log, start, ended), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _copy_log(log: Path, start: int, ended: threading.Event) -> None:
    output = sys.stdout.fileno()
    with log.open("rb") as file:
        file.seek(start)
        while True:
            last = ended.is_set()  # looked at before the read: nothing is written after the end
            try:
                while chunk := file.read(65_536):
                    while chunk:
                        chunk = chunk[os.write(output, chunk) :]
            except BrokenPipeError:
                # The reader has gone (`| head`); the run goes on without it.
                os.dup2(os.open(os.devnull, os.O_WRONLY), output)
                return
            if last:
                return
            ended.wait(POLL_S)
