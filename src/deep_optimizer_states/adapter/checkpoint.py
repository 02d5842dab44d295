"""``engine.save_checkpoint`` that returns at once: stock's files, filled while training goes on.

DeepSpeed decides what a checkpoint holds and what its files are called. For the length of its
``save_checkpoint`` it is given a checkpoint engine that takes files instead of writing them; one
that calls itself decoupled, so that DeepSpeed does not name the checkpoint in ``latest`` yet.

[Note: failures] A save that fails ends no training. It is told by a warning when it is found, its
files are removed, and ``latest`` stays as it was. With ``raise_on_failed_checkpoint`` the next
``engine.step()`` or save raises it. Content that cannot be saved in this way is raised at once.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
from deepspeed.utils import logger
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store

from deep_optimizer_states.adapter.identity import Identity, stamped
from deep_optimizer_states.config import BLOCK, Settings
from deep_optimizer_states.core.checkpoint import BackgroundSave, Stage
from deep_optimizer_states.core.commit import (
    LATEST,
    Ranks,
    Record,
    Target,
    commit,
    read_latest,
    reason,
    recover,
    told,
)
from deep_optimizer_states.core.host import spare_host_bytes
from deep_optimizer_states.errors import CheckpointError

_SHARE_OF_SPARE_MEMORY = 0.5


class _TakesFiles(CheckpointEngine):  # type: ignore[misc]
    """What DeepSpeed writes its files to while it saves.

    Attributes:
        refusal: Why content cannot be saved in this way, whatever disk and memory do.

    Args:
        stock: The checkpoint engine in whose place it stands.
        save: What takes the files.
        identity: What all files of the save have in common.
    """

    def __init__(self, stock: CheckpointEngine, save: BackgroundSave, identity: Identity) -> None:
        self.name = BLOCK
        self._stock = stock
        self._save = save
        self._identity = identity
        self.refusal: Exception | None = None

    def create(self, info: Any) -> None:
        assert info.tag == self._identity["tag"], info

    def save(self, state_dict: Any, path: str) -> None:
        with self.noting_failure():
            self._save.add(stamped(state_dict, self._identity), Path(path))

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
        except (OSError, MemoryError) as error:
            self._save.fail(error)
        except Exception as error:  # noqa: BLE001 - raised once DeepSpeed's barrier is passed
            self._save.fail(error)
            self.refusal = error


@dataclass(eq=False)
class _Save:
    """One save of this rank with all that belongs to it, from its beginning to its end.

    Attributes:
        target: Where it goes.
        files: Its files.
        ranks: Its ranks.
        record: On rank 0, its record.
        previous: The save into the same folder before it, which is named first, so that ``latest``
            is of the last call.
        then: Called once it is whole, on rank 0.
        tell: Called with what went wrong.
        has_ended: Whether it is known how it ended.
        ending: Held by the thread that ends it.
    """

    target: Target
    files: BackgroundSave
    ranks: Ranks
    record: Record | None
    previous: _Save | None
    then: Callable[[], None] | None
    tell: Callable[[CheckpointError], None]
    has_ended: bool = False
    ending: threading.Lock = field(default_factory=threading.Lock)

    def end(self) -> None:
        """Agree with the other ranks how it ends; on the save's thread, where there is one."""
        with self.ending:
            if self.has_ended:
                return
            undecided: BaseException | None = None
            try:
                if self.previous is not None:
                    self.previous.wait()
            except BaseException as error:  # noqa: BLE001 - the other ranks must hear of it
                self.files.fail(error)
            try:
                commit(self.files, self.ranks, self.record)
            except BaseException as error:  # noqa: BLE001 - a thread has nobody to raise it to
                undecided = error
            try:
                self._clean_up(undecided)
            finally:
                self.has_ended, self.previous = True, None
                if self.record is not None:
                    self.record.close()
                _under_way.remove(self)

    def wait(self) -> None:
        """Block until it has ended; one whose thread is gone, or never was, fails."""
        self.files.wait()
        if not self.has_ended:
            self.give_up(CheckpointError("its thread is gone"))

    def give_up(self, why: BaseException) -> None:
        """End a save as a failure, on the thread that calls."""
        self.files.fail(why)
        self.files.wait()
        self.end()

    def _clean_up(self, undecided: BaseException | None) -> None:
        """Remove what a failed save left, and tell; what may be whole is left to the next call."""
        if self.files.stage is Stage.FAILED:
            self.files.remove_files()
            if self.record is not None:
                self.record.remove()
            latest = read_latest(self.target.folder)
            before = f"{LATEST} names {latest} as before" if latest else "none was written before"
            why = reason(self.files, self.ranks.rank)
            self.tell(CheckpointError(f"{self.target} is not written: {why}; {before}"))
        elif undecided is not None:
            self.tell(
                CheckpointError(
                    f"{self.target} was not ended: rank {self.ranks.rank}: {told(undecided)}. "
                    "If all its files are whole, the next load or save names it"
                )
            )
        elif self.then is not None and self.record is not None:
            try:
                self.then()
            except BaseException as error:  # noqa: BLE001 - a thread has nobody to raise it to
                self.tell(CheckpointError(f"{self.target} is whole, but afterwards: {told(error)}"))


_under_way: list[_Save] = []
"""Saves of all engines of this process that have not ended, the first one first."""

_saved_into: set[Path] = set()
"""Folders that this process has saved into in the background, the same on all ranks."""


def _leave_to_the_parent() -> None:
    """Forget, in a child of fork, the saves that its parent ends, whose locks are not its own."""
    for save in _under_way:
        save.has_ended = True
        if save.record is not None:
            save.record.forget()
    _under_way.clear()


os.register_at_fork(after_in_child=_leave_to_the_parent)


def wait_for_saves(folder: Path | None = None, place: str | None = None) -> None:
    """Block until no engine of this process saves any more.

    Args:
        folder: Wait for saves into this folder alone, a path without links; None for all.
        place: Wait for those alone that write to this :attr:`Target.place`; None for all.
    """
    for save in list(_under_way):
        if folder in (None, save.target.folder) and place in (None, save.target.place):
            save.wait()


def before_load_by_others(folder: Path, is_together: bool) -> None:
    """Wait for saves into a folder that an engine loads from which itself saves in stock's way.

    Args:
        folder: A path without links.
        is_together: Every rank loads, and waits until rank 0 has named what was saved.
    """
    if folder in _saved_into:
        wait_for_saves(folder)
        if is_together:
            torch.distributed.barrier()


class Checkpoints:
    """Saves of one engine, one at a time. It may be asked from the engine's own thread alone.

    Attributes:
        when_whole: Called once, by rank 0's thread, when the next save is whole and has its names.

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
        self._failure: CheckpointError | None = None
        self._last: _Save | None = None
        self.when_whole: Callable[[], None] | None = None

    @property
    def last(self) -> BackgroundSave | None:
        """Return the last save, for what it took."""
        return None if self._last is None else self._last.files

    def save(self, engine: Any, stock_save: Callable[[], Any], target: Target) -> bool:
        """Save as DeepSpeed does, but for the bytes of state; every rank must.

        Args:
            engine: DeepSpeed's, whose ``save_checkpoint`` was called.
            stock_save: That method, with its arguments.
            target: What these say.

        Returns:
            Whether a save has begun.

        Raises:
            CheckpointError: The one before failed, and the settings ask for an error; the content
                cannot be saved in this way; or a signal handler calls it in the middle of another
                call.
        """
        if isinstance(engine.checkpoint_engine, _TakesFiles):
            raise CheckpointError(
                "a checkpoint cannot be saved in the middle of engine.save_checkpoint(), which a "
                "signal handler has interrupted: let the handler set a flag, and save afterwards"
            )
        self.wait()
        wait_for_saves(place=target.place)
        save = self._begin(target)
        if save is None:
            return False
        identity = Identity(id=save.ranks.save_id, tag=target.tag, step=int(engine.global_steps))
        try:
            taker = _TakesFiles(engine.checkpoint_engine, save.files, identity)
            with _given_to(engine, taker):
                stock_save()
            save.files.start(save.end, save.ranks.beat)
        except BaseException as error:
            save.give_up(error)
            self._failure = None  # it is raised here
            raise
        if taker.refusal is not None:
            save.wait()
            self._failure = None
            raise CheckpointError(
                f"{target} cannot be saved in the background: {taker.refusal!r}. Take out what "
                f'cannot be, or set "{BLOCK}.checkpoint" to "blocking"'
            ) from taker.refusal
        return True

    def before_load(self, folder: Path, is_together: bool) -> None:
        """Wait for saves under way, and end what an earlier process left.

        Args:
            folder: What is loaded from, a path without links.
            is_together: Every rank loads, and waits until rank 0 has ended what was left.
        """
        self.wait()
        wait_for_saves(folder)
        if torch.distributed.get_rank() == 0:
            try:
                _say(*recover(folder, removes=False))
            except Exception as error:  # noqa: BLE001 - the other ranks would wait for this one
                _say(f"{folder} cannot be looked at: {told(error)}")
        if is_together:
            torch.distributed.barrier()

    def release(self, tile: int) -> None:
        """Let an update overwrite a tile."""
        if self._last is not None:
            self._last.files.release(tile)

    def release_all(self) -> None:
        """Let somebody else overwrite state."""
        if self._last is not None:
            self._last.files.release_all()

    def wait(self) -> None:
        """Block until no save of this engine is under way."""
        if self._last is not None:
            self._last.wait()

    def check(self) -> None:
        """Raise how the last save failed, once, where the settings ask for it.

        Raises:
            CheckpointError: It names the checkpoint and the reason.
        """
        failure, self._failure = self._failure, None
        if failure is not None and self._settings.raise_on_failed_checkpoint:
            raise failure

    def _begin(self, target: Target) -> _Save | None:
        """Begin a save on all ranks, or on none; every rank must.

        Raises:
            CheckpointError: The save before failed, on any rank, and the settings ask for an error.
        """
        then, self.when_whole = self.when_whole, None
        failure, self._failure = self._failure, None
        untold = str(failure or "") if self._settings.raise_on_failed_checkpoint else ""
        rank, num_ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
        save_id, problem = secrets.token_hex(8), ""
        files: BackgroundSave | None = None
        record: Record | None = None
        save: _Save | None = None
        try:
            files = BackgroundSave(self._tiles(), self._order(), self._memory_bytes())
            if rank == 0 and not untold:
                record = _open_record(target, save_id)
        except Exception as error:  # noqa: BLE001 - the other ranks would wait for this one
            problem = f"rank {rank}: {told(error)}"
        of_all: list[Any] = [None] * num_ranks
        try:
            torch.distributed.all_gather_object(of_all, (save_id, untold, problem))
            untold, problem = (
                next(filter(None, (said[at] for said in of_all)), "") for at in (1, 2)
            )
            if files is not None and not untold and not problem:
                others = [it for it in _under_way if it.target.folder == target.folder]
                ranks = Ranks(_get_default_store(), rank, num_ranks, of_all[0][0], _say)
                previous = others[-1] if others else None
                save = _Save(target, files, ranks, record, previous, then, self._tell)
                self._last = save
                _under_way.append(save)
                _saved_into.add(target.folder)
        finally:
            if save is None and record is not None:
                record.remove()
                record.close()
        if untold:
            raise CheckpointError(untold)
        if problem:
            self._tell(CheckpointError(f"no checkpoint is written to {target.folder}: {problem}"))
        return save

    def _tell(self, error: CheckpointError) -> None:
        self._failure = error
        _say(str(error))

    def _memory_bytes(self) -> int:
        if self._settings.checkpoint_memory_bytes != "auto":
            return self._settings.checkpoint_memory_bytes
        return int(spare_host_bytes() * _SHARE_OF_SPARE_MEMORY)


def _open_record(target: Target, save_id: str) -> Record:
    """Make the folder, end what an earlier process left there, and note that a save begins."""
    target.folder.mkdir(parents=True, exist_ok=True)
    _say(*recover(target.folder, removes=True))
    return Record(target, save_id)


@contextlib.contextmanager
def _given_to(engine: Any, taker: _TakesFiles) -> Iterator[None]:
    """Let DeepSpeed write to ``taker`` in the block."""
    stock, copy_scripts = engine.checkpoint_engine, engine._copy_recovery_script

    def copy_quietly(path: str) -> None:
        with taker.noting_failure():
            copy_scripts(path)

    engine.checkpoint_engine = taker
    # Beside its files DeepSpeed copies its own scripts, on rank 0 alone.
    engine._copy_recovery_script = copy_quietly
    try:
        yield
    finally:
        engine.checkpoint_engine = stock
        del engine._copy_recovery_script


def _say(*sentences: str) -> None:
    for sentence in sentences:
        logger.warning(f"deep_optimizer_states: {sentence}")
