"""Prepared folders, named by their content and published whole or not at all.

A folder is built beside its place, under a name nobody looks for, and renamed into it. So a
process killed at any moment leaves no half folder, and of two that build the same thing at once
the second finds the first one's work and drops its own.
"""

from __future__ import annotations

import os
import shutil
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from dataset import manifest
from dataset.errors import DatasetError
from dataset.manifest import Manifest

ENVIRONMENT_VARIABLE = "DOS_DATASET_CACHE"
DEFAULT_FOLDER = Path(__file__).resolve().parents[1] / "cache"

WORK_PREFIX = ".dataset-building-"
# A work folder this old has lost its process; younger ones may belong to a build that is running.
ABANDONED_AFTER_S = 24 * 3600


def folder_to_use(given: Path | None) -> Path:
    """The cache folder, absolute: the one given, else the environment's, else the checkout's."""
    return Path(given or os.environ.get(ENVIRONMENT_VARIABLE) or DEFAULT_FOLDER).resolve()


def look_up(folder: Path, key: str) -> tuple[Manifest | None, str | None]:
    """Find a prepared folder.

    Returns:
        The manifest when the folder is whole, else None; and what is wrong with the folder, None
        when it is whole or not there at all.
    """
    if not folder.exists():
        return None, None
    try:
        found = manifest.read(folder / manifest.NAME)
    except DatasetError as error:
        return None, str(error)
    if found.key != key:
        return None, f"{manifest.NAME} is of other contents"
    damage = found.damage(folder)
    return (None, damage) if damage else (found, None)


def build(folder: Path, key: str, fill: Callable[[Path], Manifest]) -> Manifest:
    """Make ``folder`` appear in one step, with what ``fill`` put into a work folder.

    Args:
        folder: The folder's place; a damaged one there is replaced.
        key: Its content key.
        fill: Writes every file but the manifest into the folder it gets and returns the manifest.

    Raises:
        DatasetError: The cache folder cannot be written.
    """
    work = folder.parent / f"{WORK_PREFIX}{uuid.uuid4().hex}"
    try:
        work.mkdir(parents=True)
    except OSError as error:
        raise DatasetError(
            f"cannot write to the cache folder {folder.parent} ({error.strerror}): "
            f"name another with --cache-dir DIR or {ENVIRONMENT_VARIABLE}"
        ) from error
    try:
        _remove_abandoned(folder.parent)
        made = fill(work)
        made.write(work / manifest.NAME)
        _publish(work, folder, key)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return made


def _publish(work: Path, folder: Path, key: str) -> None:
    if look_up(folder, key)[1]:
        # Renamed before it is deleted, so that nobody ever sees a folder that is half deleted.
        aside = work.with_name(f"{work.name}-damaged")
        with suppress(FileNotFoundError):  # another process has just done it
            folder.rename(aside)
            if aside.is_dir():
                shutil.rmtree(aside)
            else:
                aside.unlink()
    try:
        work.rename(folder)
    except OSError:
        # A full folder is in the way: as a rule of another process that was first, and whose work
        # is as good as ours.
        if look_up(folder, key)[0] is None:
            raise


def _remove_abandoned(cache: Path) -> None:
    for path in cache.glob(f"{WORK_PREFIX}*"):
        with suppress(FileNotFoundError):  # its process has just published or removed it
            if time.time() - path.stat().st_mtime > ABANDONED_AFTER_S:
                shutil.rmtree(path, ignore_errors=True)
