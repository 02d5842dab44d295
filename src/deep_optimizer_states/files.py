"""Files that are there whole or not at all, also when the disk is full."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, text: str, overwrite: bool = False) -> None:
    """Write a text file beside its place and move it there once it is complete.

    Args:
        path: Where it belongs; what is there stays as it is when anything fails.
        text: What it holds, written as UTF-8.
        overwrite: Whether it may take the place of another file.

    Raises:
        FileExistsError: ``path`` is there and may not be overwritten.
        OSError: The file cannot be written; names ``path``.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        try:
            beside.write_text(text, encoding="utf-8")
            if overwrite:
                beside.replace(path)
            else:
                os.link(beside, path)  # unlike a rename, it fails where a file is
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
