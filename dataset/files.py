"""Digests of settings and files, and whether a file can be written."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dataset.errors import DatasetError


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
