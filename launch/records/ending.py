"""Writes how a run ended, even where nothing can be written any more."""

from __future__ import annotations

import errno
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

from launch.records.run_folder import RunFolder, Status

FULL_BYTES = 16_384
"""A file system with less room than this holds no traceback and no status."""
_FULL = (errno.ENOSPC, errno.EDQUOT)


def disk_is_full(folder: Path) -> bool:
    """Whether a file system has no room left for this user."""
    try:
        space = os.statvfs(folder)
    except OSError:
        return False
    return space.f_bavail * space.f_frsize < FULL_BYTES


def record_status(folder: RunFolder, status: Status) -> Status:
    """Write ``status.json``; what cannot be written is said on standard error, and we go on.

    A full disk has no room for a new file, but the old one's block can be written anew. Then
    ``last_lines`` are left out; the log has them.

    Returns:
        The status, with what could not be written in its cause.
    """
    try:
        folder.write_status(status)
        return status
    except OSError as error:
        lost, number = f"status.json could not be written: {error.strerror}", error.errno
    cause = f"{status.cause}; {lost}" if status.cause else lost
    status = replace(status, cause=cause)
    if number in _FULL and _overwrite(folder.path / "status.json", status):
        cause = f"{cause}; written in place, without last_lines"
    sys.stderr.write(f"{folder.path}: {cause}\n")
    return replace(status, cause=cause)


def _overwrite(path: Path, status: Status) -> bool:
    """Put a short status into the blocks that the file has; False when that fails as well."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        table.update(
            status=status.status,
            exit_code=status.exit_code,
            seconds=status.seconds,
            cause=status.cause,
            last_lines=[],
            driver=None,
        )
        text = json.dumps(table, indent=2).encode() + b"\n"
        with path.open("r+b") as file:
            file.write(text)
            file.truncate()
            file.flush()
            os.fsync(file.fileno())
    except (OSError, ValueError):
        return False
    return True
