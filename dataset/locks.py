"""One process at a time in a folder."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dataset.errors import DatasetError

NAME = ".lock"
# What file systems without such locks answer.
UNSUPPORTED = frozenset({errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK})


@contextmanager
def locked(folder: Path, drop_empty: bool = False) -> Iterator[None]:
    """Hold ``folder/.lock``; the kernel lets go of it when the process dies, however it dies.

    On a file system without locks it holds nothing.

    Args:
        folder: Made when missing.
        drop_empty: Remove it in the end when nothing is in it.

    Raises:
        DatasetError: Another process holds it.
    """
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            handle = os.open(folder / NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except FileNotFoundError:
            continue  # another process has just removed the folder
        try:
            _acquire(handle, folder)
            # A process that finished meanwhile may have deleted what was opened.
            if _is_still_there(handle, folder):
                try:
                    yield
                finally:
                    _leave(folder, drop_empty)
                return
        finally:
            os.close(handle)


def _acquire(handle: int, folder: Path) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise DatasetError(
            f"{folder} is in use by another process: wait for it, or stop it"
        ) from error
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise


def _leave(folder: Path, drop_empty: bool) -> None:
    # Still locked: whoever opened this file meanwhile finds it gone and starts again.
    (folder / NAME).unlink(missing_ok=True)
    if drop_empty and not any(folder.iterdir()):
        folder.rmdir()


def _is_still_there(handle: int, folder: Path) -> bool:
    try:
        there = (folder / NAME).stat()
    except FileNotFoundError:
        return False
    return os.path.samestat(there, os.fstat(handle))
