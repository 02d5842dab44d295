"""Locks that a killed build of a DeepSpeed op leaves behind; the next start would wait for ever."""

from __future__ import annotations

from pathlib import Path

import psutil


def clear_stale_locks(extensions_dir: Path) -> list[Path]:
    """Remove the ``lock`` files below ``extensions_dir`` that no process on this machine holds.

    A builder keeps its lock open until it is done, so one that nobody has open is left over.

    Returns:
        The files removed.
    """
    locks = [path.resolve() for path in extensions_dir.glob("*/lock") if path.is_file()]
    if not locks:
        return []
    held = _open_files()
    stale = [path for path in locks if path not in held]
    for path in stale:
        path.unlink(missing_ok=True)
    return stale


def _open_files() -> set[Path]:
    held: set[Path] = set()
    for process in psutil.process_iter():
        try:
            held.update(Path(file.path) for file in process.open_files())
        except (psutil.Error, OSError):  # it ended meanwhile, or is another user's
            continue
    return held
