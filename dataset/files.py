"""Files: errors, digests, room on disk, locks, progress."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from configs.errors import ConfigError

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
LOCK_NAME = ".lock"
# What file systems without locks answer.
UNSUPPORTED = frozenset({errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK})
# Enough to see that the lock file was deleted by its last holder, and to make it anew.
ACQUIRE_S = 0.2
TERMINAL_INTERVAL_S = 0.5
LOG_INTERVAL_S = 10.0
MEGABYTE = 1e6


class DatasetError(ConfigError):
    """Text or prepared files cannot be used; the message says which, why and what to do."""


def content_key(contents: Mapping[str, Any]) -> str:
    """Return the digest of all that decides what is built; ``contents`` must be plain JSON."""
    text = json.dumps(contents, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def require_writable(path: Path, flag: str) -> None:
    """Make the folder of a file to write, and see that files can be made in it.

    Args:
        path: The file, or a prefix of files.
        flag: The option that gave it.

    Raises:
        DatasetError: They cannot.
    """
    probe = path.with_name(f".unfinished-{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise DatasetError(f"{flag} {path}: cannot be written: {error.strerror}") from error


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Name the file when there is no room for it: the system's error does not.

    Raises:
        DatasetError: There is none; other errors are let through.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        raise DatasetError(
            f"{path}: {error.strerror}: make room and run the same command again"
        ) from error


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
    from filelock import FileLock, Timeout

    lock = FileLock(folder / LOCK_NAME, fallback_to_soft=False)
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
        (folder / LOCK_NAME).unlink(missing_ok=True)
        if drop_empty and not folder.is_symlink() and not any(folder.iterdir()):
            folder.rmdir()
        lock.release()


def progress(label: str, total_bytes: int) -> Any:
    """Return tqdm's bar over bytes: on a terminal at once, in a log a line now and then."""
    from tqdm import tqdm

    interval_s = TERMINAL_INTERVAL_S if sys.stderr.isatty() else LOG_INTERVAL_S
    tqdm.monitor_interval = 0  # no thread of its own
    return tqdm(desc=label, total=total_bytes, leave=False, unit="B", unit_scale=True,
                mininterval=interval_s, delay=interval_s)  # fmt: skip
