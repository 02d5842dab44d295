"""A checkpoint whose files are filled while training goes on. Needs torch, not DeepSpeed.

[Note: skeleton] ``torch.save`` writes a zip archive, in which every storage is one record. With
``skip_data`` it writes all of it but the bytes of the storages, in milliseconds, and leaves holes
where they belong. Where each one begins can be asked, so that any thread can fill it in later; the
file is then read like any other, by ``mmap`` too. Storages are numbered in the order in which
pickling meets them, which a second pickling into nothing finds out.

[Note: before it is overwritten] Master weights and moments lie in host memory already, so that
nothing has to be copied before it is written: only what the next update is about to overwrite. The
executor says so before each tile (:meth:`BackgroundSave.release`). What is not on disk by then is
copied into memory of a bounded size, or written there and then where that is full. Everything else
that a checkpoint holds is copied at once.

[Note: past the page cache] A write through the page cache costs a core as much as the copy that is
to be avoided. So whole pages of state are written with ``O_DIRECT``, which takes hardly any
processor time: records begin at whole pages, and state has pages of its own. What is left at both
ends of a tile, copies, and files of a file system that refuses it go through the cache.
"""

from __future__ import annotations

import bisect
import collections
import contextlib
import enum
import errno
import functools
import itertools
import math
import os
import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.serialization import skip_data
from torch.utils import serialization

from deep_optimizer_states.core.threads import Latch, run_guarded
from deep_optimizer_states.errors import CheckpointError

UNFINISHED = ".unfinished-checkpoint"
"""Ends the names of files that are not whole yet."""
PAGE_BYTES = 4096
"""Of addresses, offsets and sizes of what is written past the page cache."""
CHUNK_BYTES = 2**24
"""Bytes written in one call: whoever is about to overwrite one that is being written waits so
long."""
_NICENESS = 10
"""Of the thread that writes: the lanes go first. As ``nice`` has it."""
_PICKLE_PROTOCOL = 2
"""That of ``torch.save``."""


class Stage(enum.Enum):
    """How far a save has come. See [Note: one state] in :mod:`.commit`."""

    FILLING = "its files are being filled"
    FILLED = "all files of this rank are whole"
    AGREED = "the files of all ranks are whole, and rank 0 writes that down"
    NAMED = "its files have their names"
    FAILED = "it is given up, and its files are removed"


@dataclass(eq=False)
class _Chunk:
    """A run of bytes that a file lacks.

    Attributes:
        file: Number of the file.
        offset: Where it begins there, in bytes.
        source: The bytes, in host memory, 1-D.
        is_copy: Whether they are a copy, which no update overwrites.
        held_bytes: Memory that counts as that of copies.
        is_written: Whether the file has them.
        lock: Held by the thread that writes or copies it. A lock and not a flag: ``with`` gives it
            back wherever Ctrl-C comes.
    """

    file: int
    offset: int
    source: Tensor
    is_copy: bool = False
    held_bytes: int = 0
    is_written: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)


class BackgroundSave:
    """One save of one rank, from its first file to its end.

    Attributes:
        stage: How far it has come; changed by :meth:`advance` and :meth:`fail` alone.
        failure: Why it failed.
        copied_bytes: Bytes copied because an update came first.
        written_first_bytes: Bytes that an update waited for, since there was no memory for a copy.
        peak_bytes: The most that copies took at one time.

    Args:
        tiles: Master weights and moments of each tile, where they live. What is not in host memory
            is copied at once.
        order: Tiles in the order in which the next update overwrites them.
        memory_bytes: Host memory that copies may take, in bytes.
    """

    def __init__(
        self, tiles: Sequence[Sequence[Tensor]], order: Sequence[int], memory_bytes: int
    ) -> None:
        self.stage = Stage.FILLING
        self.failure: BaseException | None = None
        self.copied_bytes = 0
        self.written_first_bytes = 0
        self.peak_bytes = 0
        self._memory_bytes = memory_bytes
        self._places = sorted(
            (tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, number)
            for number, tensors in enumerate(tiles)
            for tensor in tensors
            if tensor.device.type == "cpu" and tensor.numel()
        )
        self._order = list(order)
        self._paths: list[Path] = []
        self._files: list[int] = []
        self._direct: list[int] = []
        self._of_tile: dict[int, list[_Chunk]] = collections.defaultdict(list)
        self._copies: collections.deque[_Chunk] = collections.deque()
        self._pending: collections.deque[_Chunk] = collections.deque()
        self._held_bytes = 0
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._has_run = Latch(lambda: self._thread in threading.enumerate())

    @property
    def paths(self) -> list[Path]:
        """Return the files by the names that they will have."""
        return list(self._paths)

    def advance(self, stage: Stage) -> None:
        """Note that the save has come to ``stage``.

        Raises:
            CheckpointError: It has failed meanwhile.
        """
        with self._lock:
            if self.stage is Stage.FAILED:
                raise CheckpointError(str(self.failure)) from self.failure
            self.stage = stage

    def fail(self, why: BaseException) -> None:
        """Write nothing more; ``why`` becomes the failure, unless there was one or it has ended."""
        with self._lock:
            if self.stage not in (Stage.NAMED, Stage.FAILED):
                self.stage, self.failure = Stage.FAILED, why

    def add(self, content: Any, path: Path) -> None:
        """Note one file and write what is not state of the optimizer, see [Note: skeleton].

        It is called before :meth:`start`, by the thread that calls for updates.

        Args:
            content: What ``torch.save`` would be given.
            path: The file's name once it is whole.

        Raises:
            CheckpointError: torch laid the file out in a way that is not known.
            FileExistsError: Another save fills this file.
            OSError: The file cannot be written.
        """
        # A save may outlive the working directory, and its folder may be moved by another name.
        path = path.parent.resolve() / path.name
        partial = unfinished(path)
        partial.open("xb").close()
        self._paths.append(path)
        records = write_skeleton(content, partial)
        self._files.append(os.open(partial, os.O_WRONLY))
        self._direct.append(_open_direct(partial))
        for offset, storage in records:
            self._note(len(self._files) - 1, offset, storage)

    def start(self, end: Callable[[], None], beat: Callable[[], None] = lambda: None) -> None:
        """Fill the files on a thread of its own, and sync them.

        Args:
            end: Called there afterwards, whatever became of it; again if it raised.
            beat: Called there now and then, to show that the save goes on.
        """
        ranks = {tile: place for place, tile in enumerate(self._order)}
        last = len(ranks)
        by_urgency = sorted(self._of_tile, key=lambda tile: ranks.get(tile, last))
        self._pending.extend(chunk for tile in by_urgency for chunk in self._of_tile[tile])

        def tell(failure: BaseException | None) -> None:
            if failure is not None:
                self.fail(failure)
            end()
            self._has_run.set()

        # Python waits for this thread before it ends: the last checkpoint is the one that counts.
        self._thread = threading.Thread(
            target=run_guarded,
            args=(functools.partial(self._run, beat), tell),
            name="deep_optimizer_states/checkpoint",
        )
        self._thread.start()

    def release(self, tile: int) -> None:
        """Let a tile be overwritten: see [Note: before it is overwritten]."""
        for chunk in self._of_tile.get(tile, ()):
            with chunk.lock:
                if not (chunk.is_written or chunk.is_copy or self.stage is Stage.FAILED):
                    self._save_from_overwriting(chunk)

    def release_all(self) -> None:
        """Let all state be overwritten."""
        for tile in list(self._of_tile):
            self.release(tile)

    def wait(self) -> None:
        """Block until the save's thread has ended, well or not."""
        if self._thread is not None and self._thread.ident is not None:
            # A `join` that Ctrl-C interrupts takes, up to Python 3.12, a thread that runs for one
            # that has ended.
            self._has_run.wait(math.inf)
            # No deadline: a write has none; for other ranks, see `Ranks`.
            self._thread.join()

    def remove_files(self) -> None:
        """Remove what is unfinished, as far as the disk lets, and let go of state and copies."""
        for chunk in itertools.chain(*self._of_tile.values()):
            # Whoever writes it must be done with the file, whose number the system gives out again.
            with chunk.lock:
                self._note_written(chunk)
        self._copies.clear()
        with contextlib.suppress(OSError):
            self._close_files()
        for path in self._paths:
            with contextlib.suppress(OSError):
                unfinished(path).unlink(missing_ok=True)

    def _note(self, file: int, offset: int, storage: torch.UntypedStorage) -> None:
        if storage.device.type != "cpu":
            self._write_early(file, offset, _bytes_of(storage).cpu(), is_copy=True)
            return
        source, begin, end = _bytes_of(storage), storage.data_ptr(), 0
        first = bisect.bisect_left(self._places, (begin, 0, 0))
        for start, stop, tile in self._places[first:]:
            if start >= begin + storage.nbytes():
                break
            self._write_early(file, offset + end, source[end : start - begin])
            end = stop - begin
            for at, to in _cuts(start, stop):
                piece = source[at - begin : to - begin]
                self._of_tile[tile].append(_Chunk(file, offset + at - begin, piece))
        self._write_early(file, offset + end, source[end:])

    def _write_early(self, file: int, offset: int, source: Tensor, is_copy: bool = False) -> None:
        """Copy bytes that may change without notice, or write them now where there is no room."""
        for at in range(0, source.numel(), CHUNK_BYTES):
            chunk = _Chunk(file, offset + at, source[at : at + CHUNK_BYTES], is_copy)
            if not self._keep_copy(chunk):
                self._write(chunk)

    def _save_from_overwriting(self, chunk: _Chunk) -> None:
        size = chunk.source.numel()
        if self._keep_copy(chunk):
            self.copied_bytes += size
            return
        try:
            self._write(chunk)
        except Exception as error:  # noqa: BLE001 - a save that fails ends no training
            self.fail(error)
        self.written_first_bytes += size

    def _keep_copy(self, chunk: _Chunk) -> bool:
        """Keep the bytes in memory of the save's own; return whether there was any."""
        size = chunk.source.numel()
        with self._lock:
            if self._held_bytes + size > self._memory_bytes:
                return False
            self._held_bytes += size
            self.peak_bytes = max(self.peak_bytes, self._held_bytes)
        copy: Tensor | None = None
        try:
            copy = chunk.source if chunk.is_copy else chunk.source.clone()
        except (MemoryError, RuntimeError):  # the second is how torch says that there is no memory
            return False
        finally:
            if copy is None:
                self._give_back(size)
        chunk.source, chunk.is_copy, chunk.held_bytes = copy, True, size
        self._copies.append(chunk)
        return True

    def _give_back(self, size: int) -> None:
        with self._lock:
            self._held_bytes -= size

    def _run(self, beat: Callable[[], None]) -> None:
        with contextlib.suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        self._fill(beat)
        # Where it has failed, an update may write still: `remove_files` waits for that.
        if self.stage is not Stage.FAILED:
            self._sync(beat)
            self._close_files()
            self.advance(Stage.FILLED)

    def _fill(self, beat: Callable[[], None]) -> None:
        # Copies first, since they hold memory. Each stays among the pending as well, so that
        # nothing is left once both are empty.
        while self.stage is not Stage.FAILED and (queue := self._copies or self._pending):
            chunk = queue.popleft()
            with chunk.lock:
                if not chunk.is_written:
                    self._write(chunk)
            beat()

    def _write(self, chunk: _Chunk) -> None:
        data = memoryview(chunk.source.numpy().data)
        done = self._write_direct(chunk, data)
        while done < len(data):
            done += os.pwrite(self._files[chunk.file], data[done:], chunk.offset + done)
        self._note_written(chunk)

    def _note_written(self, chunk: _Chunk) -> None:
        chunk.is_written, chunk.source = True, chunk.source.new_empty(0)
        self._give_back(chunk.held_bytes)
        chunk.held_bytes = 0

    def _write_direct(self, chunk: _Chunk, data: memoryview) -> int:
        """Write whole pages past the page cache, if that can be; return how many bytes."""
        file, places = self._direct[chunk.file], (chunk.source.data_ptr(), chunk.offset, len(data))
        if file < 0 or any(place % PAGE_BYTES for place in places):
            return 0
        try:
            return os.pwrite(file, data, chunk.offset) // PAGE_BYTES * PAGE_BYTES
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return 0  # the file system wants other sizes, and has opened the file all the same

    def _sync(self, beat: Callable[[], None]) -> None:
        for file in self._files:
            os.fsync(file)
            beat()
        for folder in {path.parent for path in self._paths}:
            sync(folder)

    def _close_files(self) -> None:
        """Close every file.

        Raises:
            OSError: One could not be closed, which is how some file systems tell that bytes that
                were written to them are lost.
        """
        files, self._files, self._direct = [*self._files, *self._direct], [], []
        failure: OSError | None = None
        for file in files:
            try:
                if file >= 0:
                    os.close(file)
            except OSError as error:
                failure = error
        if failure is not None:
            raise failure


def unfinished(path: Path) -> Path:
    """Return the name of a file of a checkpoint until it is whole."""
    return path.with_name(path.name + UNFINISHED)


def sync(path: Path) -> None:
    """Make a file's bytes, or the names in a folder, outlast a power cut."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def write_skeleton(content: Any, path: Path) -> list[tuple[int, torch.UntypedStorage]]:
    """Write all of ``torch.save`` but the bytes of storages, see [Note: skeleton].

    Args:
        content: What ``torch.save`` would be given.
        path: The file to write.

    Returns:
        Each storage that has bytes, after the offset in bytes at which they belong.

    Raises:
        CheckpointError: torch laid the file out in a way that is not known.
        OSError: The file cannot be written.
    """
    storages = _storages_in_order(content)
    # Checksums are computed from the bytes, and torch never reads them.
    laid_out = {"save.compute_crc32": False, "save.storage_alignment": PAGE_BYTES}
    settings: Any = serialization.config
    with path.open("wb") as stream, skip_data(), settings.patch(laid_out):
        torch.save(content, stream)
    reader: Any = torch._C.PyTorchFileReader(str(path))
    names = {name for name in reader.get_all_records() if name.startswith("data/")}
    if names != {f"data/{number}" for number in range(len(storages))}:
        raise CheckpointError(
            f"{path}: torch {torch.__version__} numbers {len(names)} storages of a checkpoint in a "
            f"way that is not known; {len(storages)} were met. Set "
            '"deep_optimizer_states.checkpoint" to "blocking"'
        )
    return [
        (reader.get_record_offset(f"data/{number}"), storage)
        for number, storage in enumerate(storages)
        if storage.nbytes()
    ]


def _storages_in_order(content: Any) -> list[torch.UntypedStorage]:
    found: dict[int, torch.UntypedStorage] = {}

    class Finder(pickle.Pickler):
        def persistent_id(self, value: Any) -> str | None:
            if not torch.is_storage(value):
                return None
            storage = value._untyped_storage if hasattr(value, "_untyped_storage") else value
            found.setdefault(storage._cdata, storage)
            return "storage"

    class Nothing:
        def write(self, data: bytes) -> int:
            return len(data)

    Finder(Nothing(), protocol=_PICKLE_PROTOCOL).dump(content)
    return list(found.values())


def _open_direct(path: Path) -> int:
    """Open a file past the page cache; return -1 where the system or the file system cannot."""
    try:
        return os.open(path, os.O_WRONLY | os.O_DIRECT)
    except (AttributeError, OSError):
        return -1


def _cuts(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Cut a run of addresses into its ends and chunks of whole pages."""
    first = min(-(-start // PAGE_BYTES) * PAGE_BYTES, stop)
    last = max(stop // PAGE_BYTES * PAGE_BYTES, first)
    bounds = [start, *range(first, last, CHUNK_BYTES), last, stop]
    return ((at, to) for at, to in itertools.pairwise(bounds) if at < to)


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
