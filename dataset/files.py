"""Digests of settings and files, files that cannot be written, and names that are not plain."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dataset.errors import DatasetError

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def content_key(contents: Mapping[str, Any]) -> str:
    """Digest of all that decides what is built; ``contents`` must be plain JSON."""
    text = json.dumps(contents, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def file_digest(path: Path) -> str:
    """SHA-256 of a file in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def require_writable(path: Path, flag: str) -> None:
    """Make the folder of a file to write, and see that files can be made in it.

    Args:
        path: The file, or a prefix of files.
        flag: Which option gave it.

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


def visible(text: str, kept: str = "") -> str:
    """A text without characters that could steer a terminal or break a line: they are spelt out.

    Args:
        text: Often a path: it can hold anything, also bytes that are no UTF-8.
        kept: Characters to leave as they are, such as a newline.
    """
    return "".join(
        c if c.isprintable() or c in kept else c.encode("unicode_escape").decode() for c in text
    )
