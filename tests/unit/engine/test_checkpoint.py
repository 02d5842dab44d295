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
    unfinished,
    write_skeleton,
)
from deep_optimizer_states.core.commit import (
    LATEST,
    TO_DO,
    Ranks,
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
    latch, go_on = threading.Event(), BackgroundSave._next

    def wait_and_go_on(save):
        assert latch.wait(LIMIT_S)
        return go_on(save)

    monkeypatch.setattr(BackgroundSave, "_next", wait_and_go_on)
    yield latch
    latch.set()


def begin(state, path, memory_bytes=10**6, order=range(4), content=None):
    """Return a save that is under way, and the list that it is added to when it is over."""
    save, ended = BackgroundSave(tiles_of(state), order, memory_bytes), []
    save.add(content or content_of(state), path)
    save.start(ended.append)
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
    assert ended == [save]
    assert save.failure is None
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
    released = threading.Event()

    def release_and_overwrite():
        save.release(0)
        overwrite(state, 0)
        released.set()

    update = threading.Thread(target=release_and_overwrite)
    update.start()
    while update.is_alive() and not save._changed._waiters:
        pass
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
    save.start(print)
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
    save.start(print)
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
    save.start(print)
    save.wait()
    assert save.failure is None
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
    assert ended == [save]
    save.remove_files()
    assert list(tmp_path.iterdir()) == []


def ranks_of(store, num_ranks=2, number=0):
    return [Ranks(store, rank, num_ranks, number) for rank in range(num_ranks)]


def filled(folder, name, text="new"):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished(path).write_text(text)
    return path


def test_a_checkpoint_is_named_once_all_ranks_are_ready(tmp_path):
    first, second = ranks_of(HashStore())
    files = [filled(tmp_path / "tag", f"rank{number}") for number in range(2)]
    results = []

    def name_it():
        results.append(commit(first, Target(tmp_path, "tag", is_latest=True)))

    naming = threading.Thread(target=name_it)
    naming.start()
    first.say_ready("", files[:1])
    assert not read_latest(tmp_path)
    assert not files[0].exists()
    second.say_ready("", files[1:])
    assert second.wait_for_end() == ""
    naming.join(LIMIT_S)
    assert results == [""]
    assert read_latest(tmp_path) == "tag"
    assert sorted(path.name for path in (tmp_path / "tag").iterdir()) == ["rank0", "rank1"]


def test_a_rank_that_failed_is_named_to_all(tmp_path):
    first, second = ranks_of(HashStore())
    first.say_ready("", [filled(tmp_path / "tag", "rank0")])
    second.say_ready("rank 1: its disk is full")
    naming = threading.Thread(target=commit, args=(first, Target(tmp_path, "tag", is_latest=True)))
    naming.start()
    assert second.wait_for_end() == "rank 1: its disk is full"
    naming.join(LIMIT_S)
    assert not read_latest(tmp_path)
    assert not (tmp_path / "tag" / "rank0").exists()


def test_latest_stays_where_the_caller_wants_it_to(tmp_path):
    (rank,) = ranks_of(HashStore(), 1)
    rank.say_ready("", [filled(tmp_path / "tag", "rank0")])
    assert commit(rank, Target(tmp_path, "tag", is_latest=False)) == ""
    assert (tmp_path / "tag" / "rank0").exists()
    assert not (tmp_path / LATEST).exists()


class Killed(BaseException):
    """The process is gone: nothing that it would have done happens."""


class Disk:
    """A disk that loses what was not synced when the power goes, after so many operations.

    Attributes:
        num_done: Operations so far: syncs, new names and removals.
    """

    def __init__(self, monkeypatch, root, last=10**6):
        self.root, self.num_done, self._last = root, 0, last
        self.synced, self.names = {}, {}
        for name in ("fsync", "replace", "unlink", "pwrite"):
            monkeypatch.setattr(os, name, self._counted(name, getattr(os, name)))
        for folder in (root, *(path for path in root.rglob("*") if path.is_dir())):
            self._sync_folder(folder)
        for path in root.rglob("*"):
            if path.is_file():
                self.synced[path.stat().st_ino] = path.read_bytes()

    def _counted(self, name, function):
        def operate(*args, **kwargs):
            if name != "pwrite":
                if self.num_done >= self._last:
                    raise Killed
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
        self.names[folder] = {path.name: path.stat().st_ino for path in folder.iterdir()}

    def lose(self, target, loses_names):
        """Write to ``target`` what is there after the power is back.

        A file system may have kept a name that was never synced, and may not have.
        """
        for folder in (self.root, *(path for path in self.root.rglob("*") if path.is_dir())):
            now = {path.name: path.stat().st_ino for path in folder.iterdir()}
            names = self.names.get(folder, now) if loses_names else now
            own = target / folder.relative_to(self.root)
            own.mkdir(parents=True, exist_ok=True)
            for name, inode in names.items():
                if not (folder / name).is_dir():
                    (own / name).write_bytes(self.synced.get(inode, b""))


OLD, NEW = "old", "new"
FILES = ["a.pt", "b.pt"]


def save_over(root, tag, state):
    """One rank's save of a file, from its first byte to its name."""
    save = BackgroundSave(tiles_of(state), range(4), 10**6)
    (root / tag).mkdir(exist_ok=True)
    for name in FILES:
        save.add({"masters": state[0]}, root / tag / name)
    rank = Ranks(HashStore(), 0, 1, 0)

    def finish(ended):
        assert ended.failure is None
        rank.say_ready("", ended.paths)
        commit(rank, Target(root, tag, is_latest=True))

    save.start(finish)
    save.wait()


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
    monkeypatch.setattr(BackgroundSave, "_sync", lambda save: None)


def with_early_names(monkeypatch):
    add = BackgroundSave.add

    def add_and_name(save, content, path):
        add(save, content, path)
        unfinished(path).replace(path)

    monkeypatch.setattr(BackgroundSave, "add", add_and_name)


def with_an_early_latest(monkeypatch):
    say_ready = Ranks.say_ready

    def name_and_say(ranks, problem, files=()):
        commit_module._write_synced(files[0].parent.parent / LATEST, files[0].parent.name)
        say_ready(ranks, problem, files)

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


def test_leftovers_are_told_and_removed_by_a_save_alone(tmp_path):
    (tmp_path / "whole").mkdir()
    own = {"whole/file.pt", "whole/notes.partial", "latest"}
    for name in own:
        (tmp_path / name).write_text("whole")
    filled(tmp_path / "torn", "file.pt")
    (told,) = recover(tmp_path, removes=False)
    assert told.startswith(f"torn in {tmp_path} was being saved")
    assert "latest names whole" in told
    assert (tmp_path / "torn" / f"file.pt{UNFINISHED}").exists()
    (told,) = recover(tmp_path, removes=True)
    assert "are removed" in told
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert left == own
    assert recover(tmp_path, removes=True) == []


def test_a_whole_checkpoint_that_was_not_named_is_named(tmp_path):
    filled(tmp_path / "tag", "a.pt")
    (tmp_path / "tag" / "b.pt").write_text("has its name already")
    (tmp_path / "tag" / TO_DO).write_text('{"files": ["a.pt", "b.pt"], "latest": "tag"}')
    (told,) = recover(tmp_path, removes=False)
    assert "was whole when its process was killed" in told
    assert read_latest(tmp_path) == "tag"
    assert sorted(path.name for path in (tmp_path / "tag").iterdir()) == ["a.pt", "b.pt"]
