"""Whether a file can be written, before the work for it is done."""

from __future__ import annotations

import os
from pathlib import Path

from dataset.errors import DatasetError


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
