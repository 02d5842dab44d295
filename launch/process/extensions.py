"""The folder of DeepSpeed's compiled ops: one that this user can write, without stale locks.

torch makes a lock file beside every op that it loads, built or not. So whoever cannot write into
the folder of a shared checkout cannot load what lies there, and builds ops in the own cache.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from configs.errors import ConfigError
from deep_optimizer_states.stale_locks import clear_stale_locks

EXTENSIONS_VARIABLE = "TORCH_EXTENSIONS_DIR"
_REMEDY = f"name a folder of your own in {EXTENSIONS_VARIABLE}"


def extensions_folder(environment: Mapping[str, str]) -> Path:
    """Return where the ranks find their ops; nothing is made yet.

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
    about = f"{EXTENSIONS_VARIABLE} = {str(folder)!r}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{about}: {error.strerror}; {_REMEDY}") from None
    if closed := _first_closed(folder):
        raise ConfigError(
            f"{about}: you cannot write into {str(closed)!r}, where torch locks an op while it "
            f"loads it; {_REMEDY}"
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
