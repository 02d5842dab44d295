"""How the ranks of a checkpoint agree that it is whole, and how it gets its names.

[Note: whole at every moment] A file has its name only once it is whole. Each rank fills its files
and syncs them, and tells rank 0 through the process group's store: collectives are the training's.
When all ranks have, rank 0 writes down in the checkpoint's folder what is to be done, gives the
files their names, and replaces ``latest``, each step synced. Killed before it wrote that down, the
checkpoint is not there and ``latest`` names the one before; killed after it, the next load or save
does what is left to do. So a tag that is used again keeps its old files until all new ones are
there. While its files get their names one by one, some are old and some are new; ``latest`` is not
there then, so that nobody takes the mixture for a checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.distributed_c10d import PrefixStore, Store

from deep_optimizer_states.core.checkpoint import UNFINISHED, sync, unfinished

LATEST = "latest"
TO_DO = "to-do" + UNFINISHED
"""In a checkpoint's folder: what is left to do once all files are filled."""
POLL_S = 0.05
"""Seconds between two looks at what other ranks say."""
LAST_WORD_S = 5.0
"""Rank 0, which may hold the store, waits so long for the others to read how a save ended."""


@dataclass(frozen=True)
class Target:
    """Where a checkpoint goes.

    Attributes:
        folder: What the user passed to ``save_checkpoint``.
        tag: Name of the folder in it that has the files.
        is_latest: Whether ``latest`` is to name it.
    """

    folder: Path
    tag: str
    is_latest: bool

    def __str__(self) -> str:
        return f"checkpoint {self.tag} in {self.folder}"


class Ranks:
    """What ranks say to each other about one save, through the process group's store.

    Args:
        store: The process group's.
        rank, num_ranks: This rank and the number of all.
        number: Of the save, the same on every rank.
    """

    def __init__(self, store: Store, rank: int, num_ranks: int, number: int) -> None:
        self.rank = rank
        self._num_ranks = num_ranks
        self._store = PrefixStore(f"deep_optimizer_states/checkpoint/{number}", store)

    def say_ready(self, problem: str, files: Sequence[Path] = ()) -> None:
        """Say that this rank's files are whole, or why they are not."""
        said = {"problem": problem, "files": [str(path) for path in files]}
        self._store.set(f"ready/{self.rank}", json.dumps(said))

    def wait_for_all(self) -> tuple[str, list[Path]]:
        """Wait until every rank has said so; return the first problem, and all ranks' files."""
        problem, files = "", list[Path]()
        for rank in range(self._num_ranks):
            said = json.loads(self._wait_for(f"ready/{rank}"))
            problem = problem or said["problem"]
            files += map(Path, said["files"])
        return problem, files

    def say_ended(self, problem: str) -> None:
        """Say how the save ended, and see that all others have read it."""
        self._store.set("ended", problem or "well")
        names = [f"read/{rank}" for rank in range(1, self._num_ranks)]
        end = time.monotonic() + LAST_WORD_S
        while names and not self._store.check(names) and time.monotonic() < end:
            time.sleep(POLL_S)

    def wait_for_end(self) -> str:
        """Wait until rank 0 has said how the save ended; return the problem."""
        said = self._wait_for("ended")
        self._store.set(f"read/{self.rank}", "yes")
        return "" if said == "well" else said

    def _wait_for(self, name: str) -> str:
        # A blocking get would keep the store from whoever makes a process group meanwhile.
        while not self._store.check([name]):
            time.sleep(POLL_S)
        return str(self._store.get(name).decode())


def recover(folder: Path, removes: bool) -> list[str]:
    """End what a process left behind that was killed while it saved.

    Args:
        folder: The folder of checkpoints.
        removes: Remove the files of saves that cannot be ended. Nothing else is ever removed.

    Returns:
        Sentences that say what was there.

    Raises:
        OSError: The folder cannot be read or written.
    """
    said = []
    for to_do in folder.glob(f"*/{TO_DO}"):
        _carry_out(to_do)
        said.append(
            f"checkpoint {to_do.parent.name} in {folder} was whole when its process was killed, "
            "and has its names now"
        )
    left = [*folder.glob(f"*/*{UNFINISHED}"), *folder.glob(f"*{UNFINISHED}")]
    tags = sorted({path.parent.name for path in left if path.parent != folder})
    if tags:
        latest = read_latest(folder)
        said.append(
            f"{', '.join(tags)} in {folder} was being saved when its process ended, and is not "
            f"whole; {LATEST} names {latest or 'none'}. "
            + ("Its unfinished files are removed" if removes else "The next save removes them")
        )
    for path in left if removes else ():
        path.unlink(missing_ok=True)
    return said


def commit(ranks: Ranks, target: Target) -> str:
    """Name a checkpoint once all ranks' files are filled; rank 0 alone does.

    Returns:
        Why it is not there; empty where it is.

    Raises:
        OSError: All is filled and written down, but the names could not be given.
    """
    problem, files = ranks.wait_for_all()
    try:
        if not problem:
            to_do = _write_down(target, files)
            _carry_out(to_do)
    except _NotWrittenDownError as error:
        problem = f"rank 0: {error}"
    finally:
        ranks.say_ended(problem)
    return problem


class _NotWrittenDownError(Exception):
    """What is to be done could not be written, so that nothing of it is done."""


def _write_down(target: Target, files: Sequence[Path]) -> Path:
    folder = target.folder / target.tag
    to_do, draft = folder / TO_DO, folder / f"draft-{TO_DO}"
    content = {
        "files": [os.path.relpath(path, folder) for path in files],
        LATEST: target.tag
        if target.is_latest or read_latest(target.folder) == target.tag
        else None,
    }
    try:
        _write_synced(draft, json.dumps(content))
        draft.replace(to_do)
        sync(folder)
    except OSError as error:
        for path in (draft, to_do):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
        raise _NotWrittenDownError(str(error)) from error
    return to_do


def _carry_out(to_do: Path) -> None:
    folder = to_do.parent
    content = json.loads(to_do.read_text())
    if read_latest(folder.parent) == folder.name:
        (folder.parent / LATEST).unlink()
        sync(folder.parent)
    for name in content["files"]:
        path = folder / name
        with contextlib.suppress(FileNotFoundError):  # it has its name already
            unfinished(path).replace(path)
    sync(folder)
    if content[LATEST] is not None:
        draft = unfinished(folder.parent / LATEST)
        _write_synced(draft, content[LATEST])
        draft.replace(folder.parent / LATEST)
        sync(folder.parent)
    to_do.unlink()


def _write_synced(path: Path, text: str) -> None:
    with path.open("w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def read_latest(folder: Path) -> str:
    """Return the tag that ``latest`` names; empty where there is none."""
    try:
        return (folder / LATEST).read_text().strip()
    except OSError:
        return ""
