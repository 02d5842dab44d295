"""One process at a time in a folder."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from dataset.errors import DatasetError

NAME = ".lock"
# What file systems without such locks answer.
UNSUPPORTED = frozenset({errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK})

# Enough to see that the lock file was deleted by its last holder, and to make it anew.
ACQUIRE_S = 0.2


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
    lock = FileLock(folder / NAME, fallback_to_soft=False)
    if (folder.is_symlink() or folder.exists()) and not folder.is_dir():
        raise DatasetError(f"{folder}: the folder for unfinished work goes there; move it away")
    while not lock.is_locked:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(ACQUIRE_S, poll_interval=ACQUIRE_S / 10)
        except Timeout as error:
            raise DatasetError(
                f"{folder} is in use by another process: wait for it, or stop it"
            ) from error
        except FileNotFoundError:
            continue  # another process has just removed the folder
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
            break
    try:
        yield
    finally:
        # Still locked: whoever has opened this file meanwhile finds it gone and starts again.
        (folder / NAME).unlink(missing_ok=True)
        if drop_empty and not folder.is_symlink() and not any(folder.iterdir()):
            folder.rmdir()
        lock.release()
