"""``engine.save_checkpoint`` that returns at once: stock's files, filled while training goes on.

DeepSpeed decides what a checkpoint holds and what its files are called. For the length of its
``save_checkpoint`` it is given a checkpoint engine that takes files instead of writing them; one
that calls itself decoupled, so that DeepSpeed does not name the checkpoint in ``latest`` yet.

[Note: failures] A save that fails ends no training. It is told by a warning when it is found, its
files are removed, and ``latest`` stays as it was. With ``raise_on_failed_checkpoint`` the next
``engine.step()`` or save raises it.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
from deepspeed.utils import logger
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store

from deep_optimizer_states.config import BLOCK, Settings
from deep_optimizer_states.core.checkpoint import UNFINISHED, BackgroundSave
from deep_optimizer_states.core.commit import LATEST, Ranks, Target, commit, read_latest, recover
from deep_optimizer_states.core.host import spare_host_bytes
from deep_optimizer_states.errors import CheckpointError

_SHARE_OF_SPARE_MEMORY = 0.5
_numbers = itertools.count()
"""Numbers of saves, of all engines of this process: every rank saves them in the same order."""


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
        self.target: Target | None = None

    def create(self, info: Any) -> None:
        self.target = Target(Path(info.save_dir), info.tag, info.save_latest)

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
        self.last: BackgroundSave | None = None
        self.when_whole: Callable[[], None] | None = None

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
        save = self.last = BackgroundSave(self._tiles(), self._order(), self._memory_bytes())
        ranks = Ranks(
            _get_default_store(),
            torch.distributed.get_rank(),
            torch.distributed.get_world_size(),
            next(_numbers),
        )
        stock, taker = engine.checkpoint_engine, _TakesFiles(engine.checkpoint_engine, save)
        engine.checkpoint_engine = taker
        # Beside its files DeepSpeed copies its own scripts, on rank 0 alone.
        copy_scripts = engine._copy_recovery_script
        engine._copy_recovery_script = lambda path: _quietly(taker, copy_scripts, path)
        try:
            stock_save()
            assert taker.target is not None, "DeepSpeed names no checkpoint"
            target = taker.target
        except BaseException as error:
            save.give_up(error)
            save.remove_files()
            ranks.say_ready(f"rank {ranks.rank}: {error!r}")
            raise
        finally:
            engine.checkpoint_engine = stock
            del engine._copy_recovery_script
        then, self.when_whole = self.when_whole, None
        save.start(lambda ended: self._finish(ended, ranks, target, then))
        return True

    def before_load(self, folder: str) -> None:
        """Wait for the save under way, and end what an earlier process left; every rank must."""
        self.wait()
        if torch.distributed.get_rank() == 0:
            try:
                _say(recover(Path(folder), removes=False))
            except OSError as error:
                _say([f"{folder} cannot be looked at: {error}"])
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
        _say([str(error)])

    def _memory_bytes(self) -> int:
        if self._settings.checkpoint_memory_bytes != "auto":
            return self._settings.checkpoint_memory_bytes
        return int(spare_host_bytes() * _SHARE_OF_SPARE_MEMORY)

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
                probe.write_bytes(b"")  # what recover() removes
                _say(recover(folder, removes=True))
            except OSError as error:
                found = [str(error)]
        torch.distributed.broadcast_object_list(found, src=0)
        return found[0]

    def _finish(
        self, save: BackgroundSave, ranks: Ranks, target: Target, then: Callable[[], None] | None
    ) -> None:
        """End a save on its own thread: agree with the other ranks, and name it on rank 0."""
        own = f"rank {ranks.rank}"
        try:
            ranks.say_ready(f"{own}: {save.failure}" if save.failure else "", save.paths)
            problem = commit(ranks, target) if ranks.rank == 0 else ranks.wait_for_end()
            if then is not None and ranks.rank == 0 and not problem:
                then()
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
            latest = read_latest(target.folder)
            before = f"{LATEST} names {latest} as before" if latest else "none was written before"
            self._tell(CheckpointError(f"{target} is not written: {problem}; {before}"))


def _say(sentences: Sequence[str]) -> None:
    for sentence in sentences:
        logger.warning(f"deep_optimizer_states: {sentence}")


def _quietly(taker: _TakesFiles, work: Callable[[str], None], path: str) -> None:
    with taker.noting_failure():
        work(path)
