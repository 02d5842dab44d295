"""Files that are filled while their tensors change, and names that they get when they are whole."""

import contextlib
import errno
import fcntl
import io
import itertools
import mmap
import os
import threading
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore

from deep_optimizer_states.core import checkpoint, commit as commit_module
from deep_optimizer_states.core.checkpoint import (
    UNFINISHED,
    BackgroundSave,
    Stage,
    unfinished,
    write_skeleton,
)
from deep_optimizer_states.core.commit import (
    LATEST,
    RECORD,
    Ranks,
    Record,
    Target,
    commit,
    read_latest,
    recover,
)
from deep_optimizer_states.errors import CheckpointError

LIMIT_S = 60
NUMEL = 1000
TILE = 250


@pytest.fixture
def state():
    """Master weights and two moments, one of them a part of a larger storage."""
    generator = torch.Generator().manual_seed(5)
    whole = torch.randn(NUMEL + 24, generator=generator)
    return [
        torch.randn(NUMEL, generator=generator),
        whole[8 : NUMEL + 8],
        torch.randn(NUMEL, generator=generator).bfloat16(),
    ]


def tiles_of(state):
    return [[one[at : at + TILE] for one in state] for at in range(0, NUMEL, TILE)]


def content_of(state):
    masters, exp_avg, exp_avg_sq = state
    moments = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq, "step": 3}
    weights = masters.bfloat16()
    return {
        "masters": [masters],
        0: moments,
        "again": masters[10:20],
        "weights": weights,
        "at": "x",
    }


def bytes_of(path):
    """What was saved there, saved anew: equal bytes for equal structure, types, sharing, bits."""
    buffer = io.BytesIO()
    torch.save(torch.load(path), buffer)
    return buffer.getvalue()


@pytest.fixture
def expected(state, tmp_path):
    """The bytes of what ``torch.save`` writes."""
    torch.save(content_of(state), tmp_path / "expected.pt")
    return bytes_of(tmp_path / "expected.pt")


@pytest.fixture
def may_write(monkeypatch):
    """No byte of state is written by the save's own thread before this is set."""
    latch, go_on = threading.Event(), BackgroundSave._fill

    def wait_and_go_on(save, beat):
        assert latch.wait(LIMIT_S)
        go_on(save, beat)

    monkeypatch.setattr(BackgroundSave, "_fill", wait_and_go_on)
    yield latch
    latch.set()


def begin(state, path, memory_bytes=10**6, order=range(4), content=None):
    """Return a save that is under way, and the list that its stage is added to when it is over."""
    save, ended = BackgroundSave(tiles_of(state), order, memory_bytes), []
    save.add(content or content_of(state), path)
    save.start(lambda: ended.append(save.stage))
    return save, ended


def overwrite(state, tile):
    for one in state:
        one[tile * TILE : (tile + 1) * TILE] = float("nan")


def test_a_skeleton_has_everything_but_the_bytes(state, tmp_path):
    content, path = content_of(state), tmp_path / "file.pt"
    records = write_skeleton(content, path)
    sizes = [storage.nbytes() for _, storage in records]
    # The slice of the masters is of the same storage; the storage of one moment is longer than it.
    assert sizes == [4 * NUMEL, 4 * (NUMEL + 24), 2 * NUMEL, 2 * NUMEL]
    found = torch.load(path)
    assert (found["at"], found[0]["step"]) == ("x", 3)
    assert not found["masters"][0].any()


def test_an_unknown_layout_is_refused(state, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "_storages_in_order", lambda content: [])
    with pytest.raises(CheckpointError, match="numbers 4 storages"):
        write_skeleton(content_of(state), tmp_path / "file.pt")


def test_files_that_nobody_disturbs_are_those_of_torch_save(state, tmp_path, expected):
    save, ended = begin(state, tmp_path / "file.pt")
    save.wait()
    assert ended == [Stage.FILLED]
    assert (save.copied_bytes, save.written_first_bytes) == (0, 0)
    assert bytes_of(unfinished(tmp_path / "file.pt")) == expected
    assert torch.load(unfinished(tmp_path / "file.pt"), mmap=True)["at"] == "x"


@pytest.mark.parametrize("chunk_bytes", [64, 2**24])
@pytest.mark.parametrize("memory_bytes", [0, 3000, 10**6])
def test_what_an_update_overwrites_is_kept(  # noqa: PLR0913 - fixtures
    state, tmp_path, expected, may_write, monkeypatch, memory_bytes, chunk_bytes
):
    monkeypatch.setattr(checkpoint, "CHUNK_BYTES", chunk_bytes)
    save, _ = begin(state, tmp_path / "file.pt", memory_bytes)
    for tile in (2, 0):
        save.release(tile)
        overwrite(state, tile)
    assert save.peak_bytes <= memory_bytes
    assert save.copied_bytes + save.written_first_bytes == 2 * TILE * 10
    assert (save.copied_bytes == 0) == (memory_bytes == 0)
    assert (save.written_first_bytes == 0) == (memory_bytes == 10**6)
    may_write.set()
    save.wait()
    overwrite(state, 1)
    assert bytes_of(unfinished(tmp_path / "file.pt")) == expected


def test_what_is_overwritten_unasked_is_lost(state, tmp_path, may_write):
    """Negative control of the test above."""
    save, _ = begin(state, tmp_path / "file.pt")
    overwrite(state, 1)
    may_write.set()
    save.wait()
    found = torch.load(unfinished(tmp_path / "file.pt"))
    assert found["masters"][0].isnan().sum() == TILE


def test_what_is_being_written_is_waited_for(state, tmp_path, monkeypatch):
    """An update that overwrites a tile of which a part is on its way to the disk."""
    masters = state[0].clone()
    writing, may_end, pwrite = threading.Event(), threading.Event(), os.pwrite

    def write_slowly(file, data, offset):
        if threading.current_thread() is not threading.main_thread():
            writing.set()
            assert may_end.wait(LIMIT_S)
        return pwrite(file, data, offset)

    monkeypatch.setattr(checkpoint.os, "pwrite", write_slowly)
    save, _ = begin(state, tmp_path / "file.pt", 0, content={"masters": state[0]})
    assert writing.wait(LIMIT_S)
    asking, released = threading.Event(), threading.Event()

    class Asked:
        def __init__(self, lock):
            self.lock = lock

        def __enter__(self):
            asking.set()
            self.lock.acquire()

        def __exit__(self, *_):
            self.lock.release()

    for chunk in save._of_tile[0]:
        chunk.lock = Asked(chunk.lock)

    def release_and_overwrite():
        save.release(0)
        overwrite(state, 0)
        released.set()

    update = threading.Thread(target=release_and_overwrite)
    update.start()
    assert asking.wait(LIMIT_S)
    assert not released.is_set()
    may_end.set()
    update.join(LIMIT_S)
    save.wait()
    assert torch.equal(torch.load(unfinished(tmp_path / "file.pt"))["masters"], masters)


def test_tiles_are_written_in_the_order_of_the_update(state, tmp_path, monkeypatch):
    offsets, pwrite = [], os.pwrite

    def note(file, data, offset):
        offsets.append(offset)
        return pwrite(file, data, offset)

    save = BackgroundSave(tiles_of(state), [3, 1, 0, 2], 0)
    save.add({"masters": state[0]}, tmp_path / "file.pt")
    monkeypatch.setattr(checkpoint.os, "pwrite", note)
    save.start(lambda: None)
    save.wait()
    first = min(offsets)
    tiles = [(offset - first) // (4 * TILE) for offset in offsets]
    assert [tile for tile, _ in itertools.groupby(tiles)] == [3, 1, 0, 2]


def in_pages(tensor, offset=0):
    """Return a copy in fresh pages, so many bytes behind the beginning of one."""
    pages = mmap.mmap(-1, offset + tensor.nbytes)
    return torch.frombuffer(pages, dtype=tensor.dtype, offset=offset).copy_(tensor)


def test_whole_pages_of_state_go_past_the_page_cache(tmp_path, monkeypatch):
    """Their ends do not, nor do tensors that have no pages of their own."""
    numel, tile_numel = 5000, 2064
    masters, other = in_pages(torch.randn(numel)), in_pages(torch.randn(numel), offset=64)
    direct, pwrite = [], os.pwrite

    def note(file, data, offset):
        if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT:
            direct.append((offset, len(data)))
        return pwrite(file, data, offset)

    tiles = [[masters[:tile_numel]], [masters[tile_numel:]], [other]]
    save = BackgroundSave(tiles, range(3), 0)
    save.add({"masters": masters, "other": other}, tmp_path / "file.pt")
    if save._direct == [-1]:
        pytest.skip("this file system cannot write past the page cache")
    monkeypatch.setattr(checkpoint.os, "pwrite", note)
    save.start(lambda: None)
    save.wait()
    first = direct[0][0]
    assert [(offset - first, size) for offset, size in direct] == [(0, 8192), (12288, 4096)]
    found = torch.load(unfinished(tmp_path / "file.pt"))
    assert torch.equal(found["masters"], masters)
    assert torch.equal(found["other"], other)


def test_a_file_system_that_wants_other_sizes_gets_them(tmp_path, monkeypatch):
    masters, pwrite = in_pages(torch.randn(5000)), os.pwrite

    def refuse_direct(file, data, offset):
        if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return pwrite(file, data, offset)

    monkeypatch.setattr(checkpoint.os, "pwrite", refuse_direct)
    save = BackgroundSave([[masters]], [0], 0)
    save.add({"masters": masters}, tmp_path / "file.pt")
    save.start(lambda: None)
    save.wait()
    assert save.stage is Stage.FILLED
    assert torch.equal(torch.load(unfinished(tmp_path / "file.pt"))["masters"], masters)


@pytest.mark.parametrize("by", ["the thread", "the update"])
def test_a_disk_that_is_full_hurts_nobody(state, tmp_path, may_write, monkeypatch, by):
    def fail(*_):
        raise OSError(28, "No space left on device")

    save, ended = begin(state, tmp_path / "file.pt", memory_bytes=2 * NUMEL)
    monkeypatch.setattr(checkpoint.os, "pwrite", fail)
    if by == "the update":
        save.release(0)
    may_write.set()
    save.wait()
    assert "No space" in str(save.failure)
    save.release_all()  # nothing is written, and nobody waits
    assert ended == [Stage.FAILED]
    save.remove_files()
    assert list(tmp_path.iterdir()) == []


ERRORS = [OSError, MemoryError, RuntimeError, KeyboardInterrupt, SystemExit]


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("call", ["pwrite", "fsync", "close"])
def test_whatever_stops_the_thread_fails_the_save(state, tmp_path, monkeypatch, call, error):
    """An error of ``close`` is how a file system on a network says that bytes are lost."""
    (tmp_path / "folder").mkdir()
    real, calling = getattr(os, call), []

    def fail(*args):
        if threading.current_thread() is not threading.main_thread() and not calling:
            calling.append(args)
            raise error("injected")
        return real(*args)

    monkeypatch.setattr(checkpoint.os, call, fail)
    save, ended = begin(state, tmp_path / "folder" / "file.pt", memory_bytes=0)
    save.wait()
    assert calling
    assert ended == [Stage.FAILED]
    assert type(save.failure) is error
    with pytest.raises(CheckpointError):
        save.advance(Stage.AGREED)
    save.remove_files()
    assert list((tmp_path / "folder").iterdir()) == []


@pytest.mark.parametrize("memory_bytes", [0, 10**6])
def test_a_write_that_is_interrupted_is_made_again(
    state, tmp_path, expected, may_write, monkeypatch, memory_bytes
):
    """By Ctrl-C, in the thread that wants to overwrite a tile: it has not, so nothing is lost."""
    save, ended = begin(state, tmp_path / "file.pt", memory_bytes)
    call = "_keep_copy" if memory_bytes else "_write"
    with monkeypatch.context() as patch:

        def interrupted(*_):
            raise KeyboardInterrupt

        patch.setattr(save, "_give_back", lambda size: None)
        patch.setattr(BackgroundSave, call, interrupted)
        with pytest.raises(KeyboardInterrupt):
            save.release(1)
    may_write.set()
    save.wait()
    assert ended == [Stage.FILLED]
    assert bytes_of(unfinished(tmp_path / "file.pt")) == expected


@pytest.mark.parametrize("error", [MemoryError, RuntimeError])
def test_what_cannot_be_copied_is_written_first(
    state, tmp_path, expected, may_write, monkeypatch, error
):
    save, ended = begin(state, tmp_path / "file.pt")
    held = save._held_bytes

    def fail(_):
        raise error("DefaultCPUAllocator: can't allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "clone", fail)
        save.release(1)
    overwrite(state, 1)
    assert (save._held_bytes, save.copied_bytes) == (held, 0)
    assert save.written_first_bytes == TILE * 10
    may_write.set()
    save.wait()
    assert ended == [Stage.FILLED]
    assert bytes_of(unfinished(tmp_path / "file.pt")) == expected


def test_a_file_that_another_save_fills_is_left_alone(state, tmp_path):
    unfinished(tmp_path / "file.pt").write_text("another's")
    save = BackgroundSave(tiles_of(state), range(4), 0)
    with pytest.raises(FileExistsError):
        save.add(content_of(state), tmp_path / "file.pt")
    save.remove_files()
    assert unfinished(tmp_path / "file.pt").read_text() == "another's"


def ranks_of(store, num_ranks=2, save_id="id", tell=lambda sentence: None):
    return [Ranks(store, rank, num_ranks, save_id, tell) for rank in range(num_ranks)]


def filled(folder, *names, value=1.0):
    """Return a save whose files are whole, and have their names still to get."""
    folder.mkdir(parents=True, exist_ok=True)
    save = BackgroundSave([], (), 10**6)
    for name in names:
        save.add({"masters": torch.full((NUMEL,), value)}, folder / name)
    save.start(lambda: None)
    save.wait()
    assert save.stage is Stage.FILLED
    return save


def names_in(folder):
    return sorted(str(it.relative_to(folder)) for it in folder.rglob("*") if it.is_file())


def end_on_ranks(saves, ranks, record):
    """Commit on every rank at once; return what each raised."""
    raised = [None] * len(ranks)

    def end(number):
        try:
            commit(saves[number], ranks[number], None if number else record)
        except Exception as error:  # noqa: BLE001 - the caller looks at it
            raised[number] = error

    threads = [threading.Thread(target=end, args=(number,)) for number in range(len(ranks))]
    for thread in reversed(threads):
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    return raised


@pytest.mark.parametrize("tag", ["tag", "run/tag"])
def test_a_checkpoint_is_named_once_all_ranks_are_ready(tmp_path, tag):
    record = Record(Target(tmp_path, tag, is_latest=True), "id")
    saves = [filled(tmp_path / tag, f"rank{number}") for number in range(2)]
    ranks = ranks_of(HashStore())
    ranks[0].say_ready(saves[0])
    assert not read_latest(tmp_path)
    assert not (tmp_path / tag / "rank0").exists()
    assert end_on_ranks(saves, ranks, record) == [None, None]
    assert [save.stage for save in saves] == [Stage.NAMED] * 2
    assert read_latest(tmp_path) == tag
    assert names_in(tmp_path) == ["latest", f"{tag}/rank0", f"{tag}/rank1"]


@pytest.mark.parametrize("number", [0, 1])
def test_a_rank_that_failed_is_named_to_all(tmp_path, number):
    record = Record(Target(tmp_path, "tag", is_latest=True), "id")
    saves = [filled(tmp_path / "tag", f"rank{rank}") for rank in range(2)]
    saves[number].fail(MemoryError("none left"))
    assert end_on_ranks(saves, ranks_of(HashStore()), record) == [None, None]
    for rank, save in enumerate(saves):
        assert save.stage is Stage.FAILED
        told = commit_module.reason(save, rank)
        assert told == f"rank {number}: MemoryError('none left')"
    assert not read_latest(tmp_path)


def test_latest_stays_where_the_caller_wants_it_to(tmp_path):
    record = Record(Target(tmp_path, "tag", is_latest=False), "id")
    commit(filled(tmp_path / "tag", "rank0"), *ranks_of(HashStore(), 1), record)
    assert names_in(tmp_path) == ["tag/rank0"]


@pytest.fixture
def clock(monkeypatch):
    """Time that passes only while somebody sleeps."""
    now = [0.0]
    monkeypatch.setattr(commit_module.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(commit_module.time, "sleep", lambda s: now.__setitem__(0, now[0] + s))
    return now


def test_a_rank_that_gives_no_sign_of_life_is_named_and_not_waited_for(tmp_path, clock):
    told = []
    record = Record(Target(tmp_path, "tag", is_latest=True), "id")
    save = filled(tmp_path / "tag", "rank0")
    commit(save, ranks_of(HashStore(), tell=told.append)[0], record)
    assert save.stage is Stage.FAILED
    assert "rank 1 has given no sign of life for 600 s" in str(save.failure)
    assert len(told) == 1
    assert "waits for rank 1" in told[0]
    assert clock[0] >= commit_module.SILENCE_S


def test_a_rank_that_is_slow_is_waited_for(tmp_path, clock, monkeypatch):
    """It gives signs of life while it fills its files, for longer than silence is borne."""
    store, sleep = HashStore(), commit_module.time.sleep
    first, second = ranks_of(store)
    record = Record(Target(tmp_path, "tag", is_latest=True), "id")
    saves = [filled(tmp_path / "tag", f"rank{number}") for number in range(2)]

    def live_on(seconds):
        sleep(seconds)
        second.beat()
        if clock[0] > 3 * commit_module.SILENCE_S and saves[1].stage is Stage.FILLED:
            second.say_ready(saves[1])
            saves[1].advance(Stage.NAMED)

    monkeypatch.setattr(commit_module, "POLL_S", 10.0)
    monkeypatch.setattr(commit_module.time, "sleep", live_on)
    commit(saves[0], first, record)
    assert saves[0].stage is Stage.NAMED


def test_a_first_rank_that_is_gone_leaves_files_that_may_be_named(tmp_path, clock):
    save = filled(tmp_path / "tag", "rank1")
    with pytest.raises(CheckpointError, match="rank 0 has given no sign of life"):
        commit(save, ranks_of(HashStore())[1], None)
    assert save.stage is Stage.FILLED


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("call", ["fsync", "write"])
def test_what_cannot_be_written_down_is_not_done(tmp_path, monkeypatch, call, error):
    record = Record(Target(tmp_path, "tag", is_latest=True), "id")
    save, real = filled(tmp_path / "tag", "rank0"), getattr(os, call)
    failing = [error("injected")]

    def fail_once(*args):
        result = real(*args)  # it may be there all the same
        if failing:
            raise failing.pop()
        return result

    monkeypatch.setattr(commit_module.os, call, fail_once)
    commit(save, *ranks_of(HashStore(), 1), record)
    assert save.stage is Stage.FAILED
    record.close()
    assert recover(tmp_path, removes=False)[0].startswith("tag in ")
    assert not read_latest(tmp_path)


def test_a_file_that_is_gone_is_not_taken_for_one_that_has_its_name(tmp_path):
    record = Record(Target(tmp_path, "tag", is_latest=True), "id")
    save = filled(tmp_path / "tag", "a.pt", "b.pt")
    (tmp_path / "tag" / "a.pt").write_bytes(unfinished(tmp_path / "tag" / "a.pt").read_bytes())
    ranks = ranks_of(HashStore(), 1)
    ranks[0].say_ready(save)
    unfinished(tmp_path / "tag" / "a.pt").unlink()
    problem, files = ranks[0].wait_for_all()
    assert not problem
    with pytest.raises(CheckpointError, match=r"a\.pt.*is gone"):
        record.write_down(files)
    assert not read_latest(tmp_path)


def test_names_that_cannot_be_given_are_given_by_the_next_call(tmp_path, monkeypatch):
    record = Record(Target(tmp_path, "tag", is_latest=True), "id")
    saves = [filled(tmp_path / "tag", f"{number}.pt") for number in range(2)]

    def fail(*_):
        raise OSError("the folder is gone")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", fail)
        raised = end_on_ranks(saves, ranks_of(HashStore()), record)
    assert ["the folder is gone" in str(error) for error in raised] == [True, True]
    assert [save.stage for save in saves] == [Stage.AGREED, Stage.FILLED]
    assert "is being saved by" not in "".join(recover(tmp_path, removes=False)), "its own process"
    record.close()
    assert "has its names now" in recover(tmp_path, removes=True)[0]
    assert names_in(tmp_path) == ["latest", "tag/0.pt", "tag/1.pt"]


def test_a_save_under_way_is_left_alone_by_others(tmp_path, monkeypatch):
    """By another engine of the process, and by a process that was started beside it."""
    with monkeypatch.context() as patch:
        patch.setattr(commit_module.os, "getpid", lambda: 17)
        first = Record(Target(tmp_path, "first", is_latest=True), "1")
    save = filled(tmp_path / "first", "file.pt")
    for removes in (False, True):
        (told,) = recover(tmp_path, removes)
        assert told.startswith(f"first in {tmp_path} is being saved by process 17 on ")
    with pytest.raises(CheckpointError, match=r"process 17 on .* is saving it already"):
        Record(Target(tmp_path, "first", is_latest=True), "2")
    second = Record(Target(tmp_path, "second", is_latest=True), "3")
    commit(filled(tmp_path / "second", "file.pt"), *ranks_of(HashStore(), 1), second)
    commit(save, *ranks_of(HashStore(), 1), first)
    assert names_in(tmp_path) == ["first/file.pt", "latest", "second/file.pt"]


class Killed(BaseException):
    """The process is gone: nothing that it would have done happens."""


class Disk:
    """A disk that loses what was not synced when the power goes, after so many operations.

    Attributes:
        num_done: Operations so far: syncs, new names and removals.
    """

    def __init__(self, monkeypatch, root, last=10**6):
        self.root, self.num_done, self._last = root, 0, last
        self.synced, self.names, self._inodes = {}, {}, root.with_name("inodes")
        self._inodes.mkdir()
        for name in ("fsync", "replace", "unlink", "pwrite", "write", "ftruncate"):
            monkeypatch.setattr(os, name, self._counted(name, getattr(os, name)))
        for folder in (root, *(path for path in root.rglob("*") if path.is_dir())):
            self._sync_folder(folder)
        for path in root.rglob("*"):
            if path.is_file():
                self.synced[path.stat().st_ino] = path.read_bytes()

    def _counted(self, name, function):
        def operate(*args, **kwargs):
            if self.num_done >= self._last:
                raise Killed
            if name not in ("pwrite", "write"):
                self.num_done += 1
            result = function(*args, **kwargs)
            if name == "fsync":
                self._sync(args[0])
            return result

        return operate

    def _sync(self, number):
        path = Path(f"/proc/self/fd/{number}").readlink()
        if path.is_dir():
            self._sync_folder(path)
        else:
            self.synced[path.stat().st_ino] = path.read_bytes()

    def _sync_folder(self, folder):
        self.names[folder] = self._names_now(folder)

    def _names_now(self, folder):
        """Return the inodes of a folder's files by name; they outlast these names."""
        names = {path.name: path.stat().st_ino for path in folder.iterdir() if path.is_file()}
        for name, inode in names.items():
            with contextlib.suppress(FileExistsError):
                os.link(folder / name, self._inodes / str(inode))
        return names

    def lose(self, target, loses_names):
        """Make of ``target`` what is there after the power is back.

        A file system may have kept a name that was never synced, and may not have.
        """
        for folder in (self.root, *(path for path in self.root.rglob("*") if path.is_dir())):
            now = self._names_now(folder)
            names = self.names.get(folder, now) if loses_names else now
            own = target / folder.relative_to(self.root)
            own.mkdir(parents=True, exist_ok=True)
            for name, inode in names.items():
                (self._inodes / str(inode)).write_bytes(self.synced.get(inode, b""))
                os.link(self._inodes / str(inode), own / name)


OLD, NEW = "old", "new"
FILES = ["a.pt", "b.pt"]


def save_over(root, tag, state):
    """One rank's save of a file, from its first byte to its name."""
    record = Record(Target(root, tag, is_latest=True), "id")
    save = BackgroundSave(tiles_of(state), range(4), 10**6)
    (root / tag).mkdir(exist_ok=True)
    for name in FILES:
        save.add({"masters": state[0]}, root / tag / name)
    save.start(lambda: None)
    save.wait()
    try:
        commit(save, *ranks_of(HashStore(), 1), record)
    finally:
        record.close()


def survive(root, tag, state, monkeypatch, after, loses_names=False):
    """Kill a save after so many operations; return the disk, and what the next process loads.

    What somebody reads who knows nothing of saves in the background must be whole as well.
    """
    before = root / "saves"
    (before / "first").mkdir(parents=True)
    for name in FILES:
        torch.save({"masters": torch.zeros(NUMEL)}, before / "first" / name)
    (before / LATEST).write_text("first")
    monkeypatch.setattr(threading, "excepthook", lambda told: None)
    with monkeypatch.context() as patch:
        disk = Disk(patch, before, after)
        with contextlib.suppress(Killed):
            save_over(before, tag, state)
    disk.lose(root / "torn", loses_names)
    if (root / "torn" / LATEST).exists():
        masters_of_latest(root / "torn")
    recover(root / "torn", removes=False)
    return disk, *masters_of_latest(root / "torn")


def masters_of_latest(folder):
    """Return the tag that ``latest`` names, and the numbers that all its files hold."""
    tag = read_latest(folder)
    first, second = (torch.load(folder / tag / name)["masters"] for name in FILES)
    if not torch.equal(first, second):
        raise RuntimeError(f"{tag}: files of two saves")
    return tag, first


@pytest.mark.parametrize("tag", ["second", "first"], ids=["new tag", "tag used again"])
@pytest.mark.parametrize("loses_names", [False, True])
def test_killed_at_any_moment_latest_names_a_whole_checkpoint(
    state, tmp_path, monkeypatch, tag, loses_names
):
    """A kill between any two operations, with all unsynced bytes lost, and names lost or kept."""
    kinds = []
    for after in range(100):
        root = tmp_path / str(after)
        root.mkdir()
        disk, named, found = survive(root, tag, state, monkeypatch, after, loses_names)
        is_new = torch.equal(found, state[0])
        assert is_new or not found.any(), f"killed after {after} operations: torn"
        assert is_new or named == "first"
        kinds.append(NEW if is_new else OLD)
        if disk.num_done < after:
            break
    assert kinds == sorted(kinds, reverse=True), "once new, always new"
    assert {OLD, NEW} == set(kinds)
    assert len(kinds) > 8


def without_sync_of_files(monkeypatch):
    monkeypatch.setattr(BackgroundSave, "_sync", lambda save, beat: None)


def with_early_names(monkeypatch):
    add = BackgroundSave.add

    def add_and_name(save, content, path):
        add(save, content, path)
        unfinished(path).replace(path)

    monkeypatch.setattr(BackgroundSave, "add", add_and_name)


def with_an_early_latest(monkeypatch):
    say_ready = Ranks.say_ready

    def name_and_say(ranks, save):
        folder = save.paths[0].parent
        commit_module._write_synced(folder.parent / LATEST, folder.name)
        say_ready(ranks, save)

    monkeypatch.setattr(Ranks, "say_ready", name_and_say)


@pytest.mark.parametrize(
    ("fault", "tag"),
    [
        (without_sync_of_files, "second"),
        (with_early_names, "first"),
        (with_an_early_latest, "second"),
    ],
)
def test_a_rule_left_out_is_seen(state, tmp_path, monkeypatch, fault, tag):
    """Negative controls of the test above."""
    fault(monkeypatch)
    wrong = []
    for after in range(30):
        root = tmp_path / str(after)
        root.mkdir()
        try:
            _, _, found = survive(root, tag, state, monkeypatch, after)
            wrong += [] if torch.equal(found, state[0]) or not found.any() else ["torn"]
        except (OSError, RuntimeError, EOFError) as error:
            wrong.append(repr(error))
    assert wrong


def killed(record):
    """The process of a save is gone, and with it the lock of its record."""
    os.close(record._number)


def test_leftovers_are_told_and_removed_by_a_save_alone(tmp_path):
    (tmp_path / "whole").mkdir()
    own = {"whole/file.pt", "whole/notes.partial", "latest"}
    for name in own:
        (tmp_path / name).write_text("whole")
    record = Record(Target(tmp_path, "torn", is_latest=True), "id")
    filled(tmp_path / "torn", "file.pt")
    killed(record)
    (told,) = recover(tmp_path, removes=False)
    assert told.startswith(f"torn in {tmp_path} was being saved")
    assert "latest names whole" in told
    assert (tmp_path / "torn" / f"file.pt{UNFINISHED}").exists()
    (told,) = recover(tmp_path, removes=True)
    assert "are removed" in told
    assert set(names_in(tmp_path)) == own
    assert recover(tmp_path, removes=True) == []


def test_files_without_a_record_do_not_stand_in_the_way(tmp_path):
    filled(tmp_path / "tag", "file.pt")
    record = Record(Target(tmp_path, "tag", is_latest=True), "id")
    commit(filled(tmp_path / "tag", "file.pt"), *ranks_of(HashStore(), 1), record)
    assert names_in(tmp_path) == ["latest", "tag/file.pt"]


def test_a_record_that_was_cut_short_removes_nothing_else(tmp_path):
    filled(tmp_path, "file.pt")
    (tmp_path / f"id{RECORD}").write_text('{"tag": "fi')
    (told,) = recover(tmp_path, removes=True)
    assert "was being saved" in told
    assert names_in(tmp_path) == [f"file.pt{UNFINISHED}"]


@pytest.mark.parametrize("is_changed", [False, True])
def test_a_whole_checkpoint_that_was_not_named_is_named(tmp_path, is_changed):
    """Unless the file that has its name is another one than was saved."""
    record = Record(Target(tmp_path, "tag", is_latest=True), "id")
    save = filled(tmp_path / "tag", "a.pt", "b.pt")
    ranks = ranks_of(HashStore(), 1)
    ranks[0].say_ready(save)
    record.write_down(ranks[0].wait_for_all()[1])
    a, b = (tmp_path / "tag" / name for name in ("a.pt", "b.pt"))
    unfinished(b).replace(b)
    if is_changed:
        unfinished(tmp_path).write_bytes(b.read_bytes())
        unfinished(tmp_path).replace(b)
    killed(record)
    (told,) = recover(tmp_path, removes=False)
    assert ("was whole when its process was killed" in told) is not is_changed
    assert read_latest(tmp_path) == ("" if is_changed else "tag")
    assert a.exists() is not is_changed
