"""The folder in which the ranks look for DeepSpeed's compiled ops."""

from __future__ import annotations

import os
from pathlib import Path

from configs.cli import say
from configs.errors import ConfigError
from deep_optimizer_states.op_locks import locks_of_ops
from launch.launchers import EXTENSIONS_VARIABLE


def ready_extensions(folder: Path) -> Path:
    """Make the folder of compiled ops ready: there, open to writing, without an old lock.

    torch makes a lock file beside every op that it loads, built or not, and waits for one that it
    finds. Locks are said. Where one is old, ops are built in a folder beside this one instead.

    Returns:
        The folder for the ranks.

    Raises:
        ConfigError: this user cannot write there.
    """
    place, number = folder, 1
    while True:
        _require_writable(place)
        locks = locks_of_ops(place)
        for lock in locks:
            say(str(lock))
        if not any(lock.is_old for lock in locks):
            break
        number += 1
        place = folder.with_name(f"{folder.name}-{number}")
    if place != folder:
        say(f"meanwhile ops are built and looked for in {place}")
    return place


def _require_writable(folder: Path) -> None:
    about = f"{EXTENSIONS_VARIABLE} = {str(folder)!r}"
    remedy = f"name a folder of your own in {EXTENSIONS_VARIABLE}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{about}: {error.strerror}; {remedy}") from None
    for place in (folder, *(path for path in folder.glob("*") if path.is_dir())):
        if not os.access(place, os.W_OK | os.X_OK):
            raise ConfigError(
                f"{about}: you cannot write into {str(place)!r}, where torch locks an op while it "
                f"loads it; {remedy}"
            )
