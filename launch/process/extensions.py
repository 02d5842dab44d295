"""The folder of DeepSpeed's compiled ops: one that this user can write, without stale locks.

torch makes a lock file beside every op that it loads, built or not. So whoever cannot write into
the folder of a shared checkout cannot load what lies there; they get a copy of their own.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat
import sys
from collections.abc import Mapping
from pathlib import Path

from configs.errors import ConfigError
from deep_optimizer_states.stale_locks import clear_stale_locks

EXTENSIONS_VARIABLE = "TORCH_EXTENSIONS_DIR"
_REMEDY = f"name a folder of your own in {EXTENSIONS_VARIABLE}"


def extensions_folder(environment: Mapping[str, str]) -> Path:
    """Where the ranks find their ops; nothing is made or copied yet.

    It is the folder that ``environment`` names, or that of this Python environment; where this user
    cannot write into the latter, one in the user's cache.
    """
    shared = _shared_folder()
    given = Path(environment.get(EXTENSIONS_VARIABLE) or shared)
    if given != shared or _first_closed(shared) is None:
        return given
    cache = environment.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    digest = hashlib.sha256(os.fsencode(shared)).hexdigest()[:12]
    return Path(cache) / "deep-optimizer-states" / f"torch_extensions-{digest}"


def ready_extensions(folder: Path) -> list[str]:
    """Make the folder ready for ranks of this user: there, open to writing, without stale locks.

    Returns:
        What became of locks, in sentences for the user.

    Raises:
        ConfigError: this user cannot write there.
    """
    shared = _shared_folder()
    try:
        if folder != shared and not folder.exists() and _first_closed(shared) is not None:
            _copy(shared, folder)
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{EXTENSIONS_VARIABLE} = {str(folder)!r}: {error.strerror}; {_REMEDY}"
        ) from None
    if closed := _first_closed(folder):
        raise ConfigError(
            f"{EXTENSIONS_VARIABLE} = {str(folder)!r}: you cannot write into {str(closed)!r}, "
            f"where torch locks an op while it loads it; {_REMEDY}"
        )
    return clear_stale_locks(folder)


def _shared_folder() -> Path:
    """Where ``make setup`` builds ahead."""
    return Path(sys.prefix) / "torch_extensions"


def _first_closed(folder: Path) -> Path | None:
    """The folder, or that of an op in it, that this user cannot write into; None for none."""
    there = folder
    while not there.exists():
        there = there.parent
    ops = [path for path in folder.glob("*") if path.is_dir()] if there == folder else []
    closed = (path for path in (there, *ops) if not os.access(path, os.W_OK | os.X_OK))
    return next(closed, None)


def _copy(shared: Path, folder: Path) -> None:
    """Copy what is built, with the times by which ninja sees that it need not be built again."""
    fresh = folder.with_name(f"{folder.name}.{os.getpid()}")
    try:
        with contextlib.suppress(shutil.Error):  # what cannot be read is built anew
            shutil.copytree(shared, fresh, ignore=shutil.ignore_patterns("lock"))
        for path in (fresh, *fresh.rglob("*")):  # modes are copied too
            path.chmod(path.stat().st_mode | stat.S_IRWXU)
        with contextlib.suppress(OSError):  # another run of this user was faster
            fresh.rename(folder)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
