"""Find, remove and report the locks of compiled ops that a killed build left behind.

While a process builds or loads an op, torch keeps an empty file ``lock`` open in the op's folder.
Whoever finds this file waits for its end, silently and without a limit. A build that is killed
leaves the file, and nothing in it says whose it was. So the lock is held if a process has it open
or ninja runs in its folder, which outlives the process that started it, and left over if not.
Processes of other machines and users cannot be looked into: a lock that may be theirs is reported
and stays.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

LOOK_S = 10.0
"""Seconds between two calls of :func:`clear_stale_locks` while something may wait."""
PAUSE_S = 1.0
"""Seconds between its two looks at a lock. torch closes the file just before it removes it, so that
a lock which nobody has open at one moment may be about to go."""
_OWN_MACHINE = {
    *("bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "fuse.fuse-overlayfs", "jfs"),
    *("overlay", "ramfs", "reiserfs", "tmpfs", "xfs", "zfs"),
}
"""File systems that no other machine writes to."""

_Inode = tuple[int, int]


class _Lock(NamedTuple):
    """A lock, and what tells it from one that is made later in its place."""

    path: Path
    inode: _Inode
    changed_ns: int
    user: int


@contextlib.contextmanager
def locks_watched(root: Path, say: Callable[[str], object]) -> Iterator[None]:
    """Clear stale locks now and then until the block ends, on a thread.

    Args:
        root: The folder of all ops (``TORCH_EXTENSIONS_DIR``).
        say: Gets each sentence of :func:`clear_stale_locks` once.
    """
    ended, said = threading.Event(), set[str]()

    def watch() -> None:
        while not ended.wait(LOOK_S):
            with contextlib.suppress(OSError):
                for line in clear_stale_locks(root):
                    if line not in said:
                        say(line)
                    said.add(line)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def clear_stale_locks(root: Path) -> list[str]:
    """Remove the locks that builds which were killed have left behind.

    Args:
        root: The folder of all ops (``TORCH_EXTENSIONS_DIR``).

    Returns:
        A sentence for each lock that was removed, and for each that is left and has to be waited
        for. A lock that comes or goes meanwhile has none, nor has one that this process holds.

    Raises:
        OSError: The folder cannot be read.
    """
    if not _locks(root):
        return []
    descriptor = os.open(root, os.O_RDONLY)
    try:
        # One process at a time judges locks, or a second one might remove what a builder makes in
        # place of what the first one removed. Some file systems know no such turns.
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        before, _ = _look(root)
        time.sleep(PAUSE_S)
        now, sees_all = _look(root)
        lines = [
            _settle(lock, before[lock] or holder, _unseen(lock, sees_all))
            for lock, holder in now.items()
            if lock in before
        ]
    finally:
        os.close(descriptor)
    return [line for line in lines if line]


def _settle(lock: _Lock, holder: int | None, unseen: str) -> str:
    """Remove a lock that no process holds, or say why it stays; empty if it is gone already."""
    op = lock.path.parent.name
    if holder == os.getpid():
        return ""  # this process builds the op itself and waits for nobody
    if holder is not None:
        return f"{lock.path}: process {holder} is building {op}, and what needs it waits for that"
    if unseen:
        return (
            f"{lock.path}: {op} is locked, and what needs it waits. No process that can be seen "
            f"holds the lock, but {unseen}. If nobody builds {op}, remove this file"
        )
    try:
        lock.path.unlink()
    except FileNotFoundError:
        return ""
    except OSError as error:
        return (
            f"{lock.path}: a build of {op} that was killed left this lock, and what needs it waits "
            f"without end; it cannot be removed ({error.strerror}), have its owner do so"
        )
    return f"{lock.path}: removed; a build of {op} that was killed left this lock"


def _locks(root: Path) -> list[_Lock]:
    """List locks of ops in a folder, or in one folder for each Python as torch has it."""
    found = []
    for path in (*root.glob("*/lock"), *root.glob("*/*/lock")):
        with contextlib.suppress(OSError):
            stat = path.stat()
            found.append(_Lock(path.resolve(), _inode(path), stat.st_ctime_ns, stat.st_uid))
    return found


def _inode(path: Path) -> _Inode:
    stat = path.stat()
    return stat.st_dev, stat.st_ino


def _look(root: Path) -> tuple[dict[_Lock, int | None], bool]:
    """Return each lock with its holder, and whether every process could be looked into."""
    locks, sees_all, holders = _locks(root), True, dict[_Inode, int]()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            # Inodes, since a path may mean another file in the container of another process.
            for held in _held_by(process):
                holders[held] = int(process.name)
        except PermissionError:
            sees_all = False
        except OSError:  # it ended meanwhile
            continue
    return {lock: _holder(lock, holders) for lock in locks}, sees_all


def _held_by(process: Path) -> Iterator[_Inode]:
    """Yield the files called ``lock`` that a process has open, and its folder if it is ninja."""
    if (process / "comm").read_text(encoding="utf-8", errors="replace").strip() == "ninja":
        yield _inode(process / "cwd")
    for link in (process / "fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            if link.readlink().name == "lock":
                yield _inode(link)


def _holder(lock: _Lock, holders: dict[_Inode, int]) -> int | None:
    with contextlib.suppress(OSError):
        return holders.get(lock.inode, holders.get(_inode(lock.path.parent)))
    return None


def _unseen(lock: _Lock, sees_all: bool) -> str:
    """Say who may hold a lock without being seen; empty if nobody can."""
    if lock.user != os.geteuid() and not sees_all:
        return "it is another user's, whose processes cannot be looked into"
    kind = _file_system_of(lock.path)
    return "" if kind in _OWN_MACHINE else f"other machines may write to its file system ({kind})"


def _file_system_of(path: Path) -> str:
    mounted = {Path(disk.mountpoint): disk.fstype for disk in psutil.disk_partitions(all=True)}
    return next((mounted[place] for place in (path, *path.parents) if place in mounted), "unknown")
