"""How the ranks of a checkpoint agree that it is whole, and how it gets its names.

[Note: whole at every moment] A file has its name only once it is whole. Each rank fills its files
and syncs them, and tells rank 0 through the process group's store: collectives are the training's.
When all ranks have, rank 0 writes down in the save's record what is to be done, gives the files
their names, and replaces ``latest``, each step synced. Killed before it wrote that down, the
checkpoint is not there and ``latest`` names the one before; killed after it, the next load or save
does what is left to do. So a tag that is used again keeps its old files until all new ones are
there. While its files get their names one by one, some are old and some are new; ``latest`` is not
there then, so that nobody takes the mixture for a checkpoint.

[Note: one state] Whether a save is good is decided by :func:`commit` alone, which takes it from one
``Stage`` to the next. Until rank 0 writes the record down, any failure of any rank, whatever it is,
ends in ``FAILED``. From there on the record decides: a save that cannot be ended then stays
``AGREED``, its files stay, and the next load or save ends it. Other ranks do what rank 0 says.

[Note: record] Rank 0 keeps one file for each save in the folder of checkpoints. It is locked while
the save's process lives, so that nobody takes the files of a save under way for those of a killed
one. Its first line says whose it is, and its second what is to be done. A line that is cut short is
no JSON, and counts as not written.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed import DistError
from torch.distributed.distributed_c10d import PrefixStore, Store

from deep_optimizer_states.core.checkpoint import (
    UNFINISHED,
    BackgroundSave,
    Stage,
    sync,
    unfinished,
)
from deep_optimizer_states.errors import CheckpointError

LATEST = "latest"
RECORD = ".save" + UNFINISHED
"""Ends the names of records of saves, which begin with the save's id."""
POLL_S = 0.05
"""Seconds between two looks at what other ranks say."""
BEAT_S = 1.0
"""Seconds between two signs of life of a rank."""
SILENCE_S = 600.0
"""A rank that has given no sign of life for so long is not waited for any more: one call that
writes or syncs takes longer nowhere."""
PATIENCE_S = 60.0
"""After so many seconds without a sign of life it is said which rank is waited for."""
_TRIES = 100
"""To lock a new record, every ``POLL_S`` seconds."""
LAST_WORD_S = 5.0
"""Rank 0, which may hold the store, waits so long for the others to read how a save ended."""


@dataclass(frozen=True)
class Target:
    """Where a checkpoint goes.

    Attributes:
        folder: What the user passed to ``save_checkpoint``, as an absolute path without links.
        tag: Name of the folder in it that has the files; it may have slashes.
        is_latest: Whether ``latest`` is to name it.
    """

    folder: Path
    tag: str
    is_latest: bool

    def __str__(self) -> str:
        return f"checkpoint {self.tag} in {self.folder}"

    @property
    def place(self) -> str:
        """Return the path of the folder that has the files, the same for ``tag`` and ``./tag``."""
        return os.path.realpath(self.folder / self.tag)


class Ranks:
    """What ranks say to each other about one save, through the process group's store.

    Args:
        store: The process group's.
        rank, num_ranks: This rank and the number of all.
        save_id: Of the save, the same on every rank.
        tell: Called with a sentence when a rank is waited for that gives no sign of life.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        num_ranks: int,
        save_id: str,
        tell: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        self.rank = rank
        self.save_id = save_id
        self._num_ranks = num_ranks
        self._store = PrefixStore(f"deep_optimizer_states/checkpoint/{save_id}", store)
        self._tell = tell
        self._last_beat_s = -BEAT_S
        self._ready: dict[str, Any] | None = None

    def beat(self) -> None:
        """Give a sign of life, if the last one is old."""
        now = time.monotonic()
        if now - self._last_beat_s >= BEAT_S:
            self._last_beat_s = now
            self._ask("add", f"beat/{self.rank}", 1)

    def say_ready(self, save: BackgroundSave) -> None:
        """Say that this rank's files are whole, or why they are not; the same words every time."""
        if self._ready is None:
            files = list[dict[str, Any]]()
            try:
                files += [] if save.failure else [_file(path) for path in save.paths]
            except BaseException as error:  # noqa: BLE001 - rank 0 waits to hear of it
                save.fail(error)
            self._ready = {"problem": reason(save, self.rank), "files": files}
        self._ask("set", f"ready/{self.rank}", json.dumps(self._ready))
        if self._ready["problem"]:  # it knows how this ends
            self._ask("set", f"read/{self.rank}", "yes")

    def wait_for_all(self) -> tuple[str, list[dict[str, Any]]]:
        """Wait until every rank has said so; return the first problem, and all ranks' files.

        Raises:
            CheckpointError: A rank gives no sign of life.
        """
        problem, files = "", list[dict[str, Any]]()
        for rank in range(self._num_ranks):
            said = json.loads(self._wait_for(f"ready/{rank}", rank))
            problem = problem or said["problem"]
            files += said["files"]
        return problem, files

    def say_ended(self, stage: Stage, problem: str) -> None:
        """Say how the save ended, and see that all others have read it."""
        self._ask("set", "ended", json.dumps({"stage": stage.name, "problem": problem}))
        names = [f"read/{rank}" for rank in range(1, self._num_ranks)]
        end = time.monotonic() + LAST_WORD_S
        while names and not self._ask("check", names) and time.monotonic() < end:
            time.sleep(POLL_S)

    def wait_for_end(self) -> tuple[Stage, str]:
        """Wait until rank 0 has said how the save ended; return that, and the problem.

        Raises:
            CheckpointError: Rank 0 gives no sign of life.
        """
        said = json.loads(self._wait_for("ended", 0))
        self._ask("set", f"read/{self.rank}", "yes")
        return Stage[said["stage"]], said["problem"]

    def _ask(self, method: str, *args: Any) -> Any:
        try:
            return getattr(self._store, method)(*args)
        except DistError as error:
            raise CheckpointError(
                "ranks cannot tell each other any more that their files are whole, since the "
                f"process group's store is gone; its launcher or rank 0 may have held it ({error})"
            ) from error

    def _wait_for(self, name: str, rank: int) -> str:
        beats, since, is_told = -1, time.monotonic(), False
        # A blocking get would keep the store from whoever makes a process group meanwhile.
        while not self._ask("check", [name]):
            self.beat()
            beats_now, now = self._ask("add", f"beat/{rank}", 0), time.monotonic()
            if beats_now != beats:
                beats, since = beats_now, now
            silence = now - since
            if silence > SILENCE_S:
                raise CheckpointError(f"rank {rank} has given no sign of life for {silence:.0f} s")
            if silence > PATIENCE_S and not is_told:
                is_told = True
                self._tell(
                    f"a checkpoint waits for rank {rank}, which has given no sign of life for "
                    f"{silence:.0f} s, and gives up after {SILENCE_S:.0f} s"
                )
            time.sleep(POLL_S)
        return str(self._ask("get", name).decode())


def reason(save: BackgroundSave, rank: int) -> str:
    """Return why a save failed, with the number of the rank that found out; empty if it did not."""
    if save.failure is None:
        return ""
    text = told(save.failure)
    return text if text.startswith("rank ") else f"rank {rank}: {text}"


def told(error: BaseException) -> str:
    """Return an error in words; those of the system name a file, which ``repr`` leaves out."""
    is_sentence = isinstance(error, (CheckpointError, OSError)) and str(error)
    return str(error) if is_sentence else repr(error)


def _file(path: Path) -> dict[str, Any]:
    status = unfinished(path).stat()
    return {"path": str(path), "inode": status.st_ino, "bytes": status.st_size}


class Record:
    """The record of a save under way, held by rank 0. See [Note: record].

    Args:
        target: Where the checkpoint goes.
        save_id: Of the save.

    Raises:
        CheckpointError: Another process saves there.
        OSError: The folder cannot be written.
    """

    def __init__(self, target: Target, save_id: str) -> None:
        self.target = target
        self.path = target.folder / f"{save_id}{RECORD}"
        for other in _records(target.folder):
            if other.is_live and other.place == target.place:
                raise CheckpointError(f"{other.owner} is saving it already")
        self._may_be_written = False
        self._number = _open_locked(self.path)
        try:
            owner = {"tag": target.tag, "pid": os.getpid(), "host": socket.gethostname()}
            self._owner_bytes = _append(self._number, owner)
            # What was left without a record, whoever wrote it, would stand in this save's way.
            _remove_unfinished(target.folder / target.tag)
        except BaseException:
            self.remove()
            self.close()
            raise

    def write_down(self, files: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Write down, and return, that these files are whole and are to get their names.

        Args:
            files: As :meth:`Ranks.wait_for_all` gives them.

        Raises:
            CheckpointError: A file is gone.
            OSError: It cannot be written.
        """
        folder, tag = self.target.folder, self.target.tag
        for file in files:
            if not _has_size(unfinished(Path(file["path"])), file):
                raise CheckpointError(f"{unfinished(Path(file['path']))} is gone")
        content = {
            "files": [{**file, "path": os.path.relpath(file["path"], folder)} for file in files],
            "tag": tag,
            LATEST: tag if self.target.is_latest or read_latest(folder) == tag else None,
        }
        self._may_be_written = True
        _append(self._number, content)
        os.fsync(self._number)
        sync(folder)
        return content

    def withdraw(self) -> None:
        """Take back what was written down, so that nobody does it.

        Raises:
            OSError: It may still be there.
        """
        if self._may_be_written:
            os.ftruncate(self._number, self._owner_bytes)
            os.fsync(self._number)

    def remove(self) -> None:
        """Remove it, and the unfinished files of ranks that could not, as far as the disk lets."""
        with contextlib.suppress(OSError):
            _remove_unfinished(self.target.folder / self.target.tag)
            self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Let it go; what it says is left to the next load or save."""
        with contextlib.suppress(OSError):
            # A child of fork may have the file still, and with it the lock.
            fcntl.flock(self._number, fcntl.LOCK_UN)
        self.forget()

    def forget(self) -> None:
        """Close it in a child of fork, whose parent goes on to hold it."""
        with contextlib.suppress(OSError):
            os.close(self._number)


@dataclass(frozen=True)
class _Found:
    """What a record in a folder says.

    Attributes:
        path: Its file.
        is_live: Whether its process lives, or cannot be known not to.
        tag: Of the checkpoint; None if the process was killed before it said so.
        owner: The process, in words.
        content: What is to be done; None before that is written down.
    """

    path: Path
    is_live: bool
    tag: str | None
    owner: str
    content: dict[str, Any] | None

    @property
    def place(self) -> str | None:
        """Return the path of the folder that has the checkpoint's files, without links."""
        return None if self.tag is None else os.path.realpath(self.path.parent / self.tag)


def _records(folder: Path) -> Iterator[_Found]:
    """Read every record of a folder; that of a dead process is locked until the next is read."""
    for path in sorted(folder.glob(f"*{RECORD}")):
        try:
            number = os.open(path, os.O_RDWR)
        except FileNotFoundError:
            continue  # its save has ended meanwhile
        try:
            refusal = _lock(number)
            lines = _json_lines(os.pread(number, os.fstat(number).st_size, 0))
            owner = lines[0] if lines else {}
            words = f"process {owner.get('pid')} on {owner.get('host')}"
            if refusal is not None and refusal.errno != errno.EWOULDBLOCK:
                words += f" (or was: {refusal}; if it is gone, remove {path})"
            content = lines[1] if len(lines) > 1 else None
            yield _Found(path, refusal is not None, owner.get("tag"), words, content)
        finally:
            os.close(number)


def _json_lines(text: bytes) -> list[dict[str, Any]]:
    lines = list[dict[str, Any]]()
    for line in text.splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:
            break
    return lines


def _append(number: int, content: dict[str, Any]) -> int:
    line = (json.dumps(content) + "\n").encode()
    if os.write(number, line) != len(line):
        raise OSError(errno.ENOSPC, "only a part could be written")
    return len(line)


def _open_locked(path: Path) -> int:
    """Make a file and lock it, where the file system can.

    Whoever looks at the folder in between takes it for that of a process that was killed: it has
    the lock for a moment, and may have removed the file.
    """
    for _ in range(_TRIES):
        number = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        refusal = _lock(number)
        is_taken = refusal is not None and refusal.errno == errno.EWOULDBLOCK
        if not is_taken and os.fstat(number).st_nlink:
            return number
        os.close(number)
        time.sleep(POLL_S)
    raise CheckpointError(f"{path} is locked by another process: end that, or save elsewhere")


def _lock(number: int) -> OSError | None:
    """Lock an open file until it is closed or the process ends; return why it could not be."""
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error
    return None


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
    said, torn = list[str](), list[str]()
    own = f"process {os.getpid()} on {socket.gethostname()}"
    for found in _records(folder):
        if found.is_live:
            if found.owner != own:
                said.append(f"{found.tag} in {folder} is being saved by {found.owner}")
        elif found.content is not None and _is_whole(folder, found.content):
            _carry_out(found.path, found.content)
            said.append(
                f"checkpoint {found.tag} in {folder} was whole when its process was killed, and "
                "has its names now"
            )
        else:
            torn.append("a checkpoint" if found.tag is None else found.tag)
            if removes:
                if found.tag is not None:
                    _remove_unfinished(folder / found.tag)
                found.path.unlink(missing_ok=True)
    if torn:
        said.append(
            f"{', '.join(torn)} in {folder} was being saved when its process ended, and is not "
            f"whole; {LATEST} names {read_latest(folder) or 'none'}. "
            + ("Its unfinished files are removed" if removes else "The next save removes its files")
        )
    return said


def commit(save: BackgroundSave, ranks: Ranks, record: Record | None) -> None:
    """Take a save from the end of its filling to its end; every rank must. See [Note: one state].

    Args:
        save: The save.
        ranks: Its ranks.
        record: On rank 0, its record.

    Raises:
        BaseException: It is not known here how the save ended; unless its stage is ``FAILED``, its
            files must stay.
    """
    try:
        _surely(ranks.say_ready, save)
    except BaseException as error:
        if record is None:
            raise
        save.fail(error)  # nothing is written down yet
    if record is not None:
        _decide(save, ranks, record)
        return
    if save.stage is Stage.FAILED:
        return  # of this rank's own accord, so that rank 0 cannot but say so
    stage, problem = ranks.wait_for_end()
    if stage is Stage.FAILED:
        save.fail(CheckpointError(problem))
    elif stage is Stage.NAMED:
        save.advance(stage)
    else:
        raise CheckpointError(problem)


def _decide(save: BackgroundSave, ranks: Ranks, record: Record) -> None:
    problem = ""
    try:
        content = _agree(save, ranks, record)
        if content is not None:
            _carry_out(record.path, content)
            save.advance(Stage.NAMED)
        problem = reason(save, ranks.rank)
    except BaseException as error:
        problem = f"rank {ranks.rank}: {told(error)}"
        raise
    finally:
        _surely(ranks.say_ended, save.stage, problem)


def _surely(say: Callable[..., None], *words: Any) -> None:
    """Say it, and once more if that failed: the other ranks wait for it."""
    try:
        say(*words)
    except CheckpointError:  # nobody hears
        raise
    except BaseException:
        say(*words)
        raise


def _agree(save: BackgroundSave, ranks: Ranks, record: Record) -> dict[str, Any] | None:
    """Return what is to be done, if all files are whole and that is written down."""
    if save.stage is Stage.FAILED:
        return None
    try:
        problem, files = ranks.wait_for_all()
        if problem:
            raise CheckpointError(problem)
        save.advance(Stage.AGREED)
        return record.write_down(files)
    except BaseException as error:  # noqa: BLE001 - the save fails, and says why
        record.withdraw()  # where this raises, the record decides
        save.fail(error)
        return None


def _carry_out(record: Path, content: dict[str, Any]) -> None:
    folder, latest = record.parent, content[LATEST]
    if read_latest(folder) == content["tag"]:
        (folder / LATEST).unlink()
        sync(folder)
    paths = [folder / file["path"] for file in content["files"]]
    for path, file in zip(paths, content["files"], strict=True):
        if not _is_named(path, file):
            unfinished(path).replace(path)
    for parent in {path.parent for path in paths}:
        sync(parent)
    if latest is not None:
        draft = unfinished(record.with_suffix("." + LATEST))
        _write_synced(draft, latest)
        draft.replace(folder / LATEST)
        sync(folder)
    record.unlink(missing_ok=True)


def _is_whole(folder: Path, content: dict[str, Any]) -> bool:
    paths = [(folder / file["path"], file) for file in content["files"]]
    return all(_has_size(unfinished(path), file) or _is_named(path, file) for path, file in paths)


def _has_size(path: Path, file: dict[str, Any]) -> bool:
    return path.is_file() and path.stat().st_size == file["bytes"]


def _is_named(path: Path, file: dict[str, Any]) -> bool:
    """Return whether a file has its name already; an older one of that name is another inode."""
    return _has_size(path, file) and path.stat().st_ino == file["inode"]


def _remove_unfinished(folder: Path) -> None:
    for path in folder.glob(f"*{UNFINISHED}"):
        if not path.name.endswith(RECORD):
            path.unlink(missing_ok=True)


def _write_synced(path: Path, text: str) -> None:
    with path.open("w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def read_latest(folder: Path) -> str | None:
    """Return the tag that ``latest`` names; None where there is none."""
    try:
        return (folder / LATEST).read_text().strip()
    except OSError:
        return None
