"""``engine.save_checkpoint`` that returns at once: stock's files, filled while training goes on.

DeepSpeed decides what a checkpoint holds and what its files are called. For the length of its
``save_checkpoint`` it is given a checkpoint engine that takes files instead of writing them; one
that calls itself decoupled, so that DeepSpeed does not name the checkpoint in ``latest`` yet.

[Note: whole at every moment] A file has its name only once it is whole. Each rank fills its files
and syncs them, and tells rank 0 through the process group's store: collectives are the training's.
When all ranks have, rank 0 writes down in the checkpoint's folder what is to be done, gives the
files their names, and replaces ``latest``, each step synced. Killed before it wrote that down, the
checkpoint is not there and ``latest`` names the one before; killed after it, the next load or save
does what is left to do. So a tag that is used again keeps its old files until all new ones are
there.

[Note: failures] A save that fails ends no training. It is told by a warning when it is found, its
files are removed, and ``latest`` stays as it was. With ``raise_on_failed_checkpoint`` the next
``engine.step()`` or save raises it.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
from deepspeed.utils import logger
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from deep_optimizer_states.config import BLOCK, Settings
from deep_optimizer_states.core.checkpoint import (
    UNFINISHED,
    BackgroundSave,
    sync_folder,
    unfinished,
)
from deep_optimizer_states.core.host import free_host_bytes, local_ranks
from deep_optimizer_states.errors import CheckpointError

LATEST = "latest"
TO_DO = "to-do" + UNFINISHED
"""In a checkpoint's folder: what is left to do once all files are filled."""
POLL_S = 0.05
"""Seconds between two looks at what other ranks say."""
LAST_WORD_S = 5.0
"""Rank 0, which may hold the store, waits so long for the others to read how a save ended."""
_SHARE_OF_FREE_MEMORY = 0.5


@dataclass(frozen=True)
class _Target:
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


class _TakesFiles(CheckpointEngine):  # type: ignore[misc]
    """What DeepSpeed writes its files to while it saves.

    Args:
        stock: The checkpoint engine in whose place it stands.
        save: What takes the files.
    """

    def __init__(self, stock: CheckpointEngine, save: BackgroundSave) -> None:
        self.name = BLOCK
        self._stock = stock
        self._save = save
        self.target: _Target | None = None

    def create(self, info: Any) -> None:
        self.target = _Target(Path(info.save_dir), info.tag, info.save_latest)

    def save(self, state_dict: Any, path: str) -> None:
        with self.noting_failure():
            self._save.add(state_dict, Path(path))

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        with self.noting_failure():
            self._stock.makedirs(path, exist_ok=exist_ok)

    def load(self, path: str, map_location: Any = None) -> Any:
        return self._stock.load(path, map_location)

    def commit(self, info: Any) -> bool:
        return True

    def is_data_parallel_writer(self, dp_rank: int) -> bool:
        return bool(self._stock.is_data_parallel_writer(dp_rank))

    def is_decoupled(self) -> bool:
        return True

    @contextlib.contextmanager
    def noting_failure(self) -> Iterator[None]:
        """Let other ranks hear of it, who would wait for this one for ever if it raised."""
        try:
            yield
        except OSError as error:
            self._save.give_up(error)


class Checkpoints:
    """Saves of one engine, one at a time. It may be asked from the engine's own thread alone.

    Attributes:
        last: The last save, for what it took.

    Args:
        settings: The checked block of the config.
        tiles: Gives master weights and moments of each tile where they live.
        order: Gives the tiles in the order in which the next update overwrites them.
    """

    def __init__(
        self,
        settings: Settings,
        tiles: Callable[[], Sequence[Sequence[Tensor]]],
        order: Callable[[], Sequence[int]],
    ) -> None:
        self._settings = settings
        self._tiles = tiles
        self._order = order
        self._number = 0
        self._failure: CheckpointError | None = None
        self.last: BackgroundSave | None = None

    def save(self, engine: Any, stock_save: Callable[[], Any], folder: Path) -> bool:
        """Save as DeepSpeed does, but for the bytes of state; every rank must.

        Args:
            engine: DeepSpeed's, whose ``save_checkpoint`` was called.
            stock_save: That method, with its arguments.
            folder: Its first argument.

        Returns:
            Whether a save has begun.

        Raises:
            CheckpointError: The one before failed, and the settings ask for an error; or a signal
                handler calls it in the middle of another call.
        """
        if isinstance(engine.checkpoint_engine, _TakesFiles):
            raise CheckpointError(
                "a checkpoint cannot be saved in the middle of engine.save_checkpoint(), which a "
                "signal handler has interrupted: let the handler set a flag, and save afterwards"
            )
        self.wait()
        self.check()
        if problem := self._prepare(folder):
            self._tell(CheckpointError(f"no checkpoint is written to {folder}: {problem}"))
            return False
        self._number += 1
        tiles = self._tiles()
        save = self.last = BackgroundSave(tiles, self._order(), self._memory_bytes(tiles))
        stock, taker = engine.checkpoint_engine, _TakesFiles(engine.checkpoint_engine, save)
        engine.checkpoint_engine = taker
        # Beside its files DeepSpeed copies its own scripts, on rank 0 alone.
        copy_scripts = engine._copy_recovery_script
        engine._copy_recovery_script = lambda path: _quietly(taker, copy_scripts, path)
        try:
            stock_save()
            assert taker.target is not None, "DeepSpeed names no checkpoint"
            ranks = Ranks(self._number)
            target = taker.target
        except BaseException as error:
            save.give_up(error)
            save.remove_files()
            Ranks(self._number).say_ready(f"rank {torch.distributed.get_rank()}: {error!r}")
            raise
        finally:
            engine.checkpoint_engine = stock
            del engine._copy_recovery_script
        save.start(lambda ended: self._finish(ended, ranks, target))
        return True

    def before_load(self, folder: str) -> None:
        """Wait for the save under way, and end what an earlier process left; every rank must."""
        self.wait()
        if torch.distributed.get_rank() == 0:
            try:
                recover(Path(folder), removes=False)
            except OSError as error:
                logger.warning(f"deep_optimizer_states: {folder} cannot be looked at: {error}")
        torch.distributed.barrier()

    def release(self, tile: int) -> None:
        """Let an update overwrite a tile."""
        if self.last is not None:
            self.last.release(tile)

    def release_all(self) -> None:
        """Let somebody else overwrite state."""
        if self.last is not None:
            self.last.release_all()

    def wait(self) -> None:
        """Block until no save is under way."""
        if self.last is not None:
            self.last.wait()

    def check(self) -> None:
        """Raise how the last save failed, once, where the settings ask for it.

        Raises:
            CheckpointError: It names the checkpoint and the reason.
        """
        failure, self._failure = self._failure, None
        if failure is not None and self._settings.raise_on_failed_checkpoint:
            raise failure

    def _tell(self, error: CheckpointError) -> None:
        self._failure = error
        logger.warning(f"deep_optimizer_states: {error}")

    def _memory_bytes(self, tiles: Sequence[Sequence[Tensor]]) -> int:
        if self._settings.checkpoint_memory_bytes != "auto":
            return self._settings.checkpoint_memory_bytes
        own = sum(tensor.nbytes for tensors in tiles for tensor in tensors)
        return min(own, int(free_host_bytes() * _SHARE_OF_FREE_MEMORY) // local_ranks())

    def _prepare(self, folder: Path) -> str:
        """Make the folder, and end what an earlier process left there; every rank must.

        Returns:
            Why nothing can be written there; empty where it can.
        """
        found = [""]
        if torch.distributed.get_rank() == 0:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                probe = folder / f"probe{UNFINISHED}"
                probe.write_bytes(b"")
                recover(folder, removes=True)
            except OSError as error:
                found = [str(error)]
        torch.distributed.broadcast_object_list(found, src=0)
        return found[0]

    def _finish(self, save: BackgroundSave, ranks: Ranks, target: _Target) -> None:
        """End a save on its own thread: agree with the other ranks, and name it on rank 0."""
        own = f"rank {ranks.rank}"
        try:
            ranks.say_ready(f"{own}: {save.failure}" if save.failure else "", save.paths)
            problem = _commit(ranks, target) if ranks.rank == 0 else ranks.wait_for_end()
        except Exception as error:  # noqa: BLE001 - a thread has nobody to raise it to
            # Its files stay: rank 0 may have written down that they are to be named.
            self._tell(
                CheckpointError(
                    f"{target} was not ended: {own}: {error!r}. If all its files are whole, the "
                    "next load or save names it"
                )
            )
            return
        if problem:
            save.remove_files()
            latest = _read_latest(target.folder)
            before = f"{LATEST} names {latest} as before" if latest else "none was written before"
            self._tell(CheckpointError(f"{target} is not written: {problem}; {before}"))


class Ranks:
    """What ranks say to each other about one save, through the process group's store.

    Args:
        number: Of the save, the same on every rank.
    """

    def __init__(self, number: int) -> None:
        self.rank, self._num_ranks = (
            torch.distributed.get_rank(),
            torch.distributed.get_world_size(),
        )
        self._store: Store = PrefixStore(f"{BLOCK}/checkpoint/{number}", _get_default_store())

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


def recover(folder: Path, removes: bool) -> None:
    """End what a process left behind that was killed while it saved; say what there is.

    Args:
        folder: The folder of checkpoints.
        removes: Remove the files of saves that cannot be ended. Nothing else is ever removed.

    Raises:
        OSError: The folder cannot be read or written.
    """
    for to_do in folder.glob(f"*/{TO_DO}"):
        _carry_out(to_do)
        logger.warning(
            f"deep_optimizer_states: checkpoint {to_do.parent.name} in {folder} was whole when its "
            "process was killed; it has its names now"
        )
    left = [*folder.glob(f"*/*{UNFINISHED}"), *folder.glob(f"*{UNFINISHED}")]
    probes = {folder / f"probe{UNFINISHED}"}
    tags = sorted({path.parent.name for path in left if path.parent != folder})
    if tags:
        latest = _read_latest(folder)
        logger.warning(
            f"deep_optimizer_states: {', '.join(tags)} in {folder} was being saved when its "
            f"process ended, and is not whole; {LATEST} names {latest or 'none'}. "
            + ("Its unfinished files are removed" if removes else "The next save removes it")
        )
    for path in left if removes else probes.intersection(left):
        path.unlink(missing_ok=True)


def _commit(ranks: Ranks, target: _Target) -> str:
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


def _write_down(target: _Target, files: Sequence[Path]) -> Path:
    folder = target.folder / target.tag
    to_do, draft = folder / TO_DO, folder / f"draft-{TO_DO}"
    content = {
        "files": [os.path.relpath(path, folder) for path in files],
        LATEST: target.tag if target.is_latest else None,
    }
    try:
        _write_synced(draft, json.dumps(content))
        draft.replace(to_do)
        sync_folder(folder)
    except OSError as error:
        for path in (draft, to_do):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
        raise _NotWrittenDownError(str(error)) from error
    return to_do


def _carry_out(to_do: Path) -> None:
    folder = to_do.parent
    content = json.loads(to_do.read_text())
    for name in content["files"]:
        path = folder / name
        with contextlib.suppress(FileNotFoundError):  # it has its name already
            unfinished(path).replace(path)
    sync_folder(folder)
    if content[LATEST] is not None:
        draft = unfinished(folder.parent / LATEST)
        _write_synced(draft, content[LATEST])
        draft.replace(folder.parent / LATEST)
        sync_folder(folder.parent)
    to_do.unlink()


def _write_synced(path: Path, text: str) -> None:
    with path.open("w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def _read_latest(folder: Path) -> str:
    try:
        return (folder / LATEST).read_text().strip()
    except OSError:
        return ""


def _quietly(taker: _TakesFiles, work: Callable[[str], None], path: str) -> None:
    with taker.noting_failure():
        work(path)
