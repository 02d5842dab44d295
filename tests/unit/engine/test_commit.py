"""How ranks agree that a checkpoint is whole, its names, and what a killed process leaves."""

import contextlib
import errno
import os
import threading
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore

from deep_optimizer_states.core import commit as commit_module
from deep_optimizer_states.core.checkpoint import UNFINISHED, BackgroundSave, Stage, unfinished
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
ERRORS = [OSError, MemoryError, RuntimeError, KeyboardInterrupt, SystemExit]


@pytest.fixture
def state():
    """Master weights."""
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(5))


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


@pytest.mark.parametrize("tag", ["tag", "run/tag", ""])
def test_a_checkpoint_is_named_once_all_ranks_are_ready(tmp_path, tag):
    record = Record(Target(tmp_path, tag, is_latest=True), "id")
    saves = [filled(tmp_path / tag, f"rank{number}") for number in range(2)]
    ranks = ranks_of(HashStore())
    ranks[0].say_ready(saves[0])
    assert read_latest(tmp_path) is None
    assert not (tmp_path / tag / "rank0").exists()
    assert end_on_ranks(saves, ranks, record) == [None, None]
    assert [save.stage for save in saves] == [Stage.NAMED] * 2
    assert read_latest(tmp_path) == tag
    assert names_in(tmp_path) == ["latest", *(str(Path(tag, f"rank{it}")) for it in range(2))]


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


@pytest.mark.parametrize("number", [0, 1])
def test_a_rank_whose_file_is_gone_tells_the_others(tmp_path, number):
    record = Record(Target(tmp_path, "tag", is_latest=True), "id")
    saves = [filled(tmp_path / "tag", f"rank{rank}") for rank in range(2)]
    unfinished(tmp_path / "tag" / f"rank{number}").unlink()
    assert end_on_ranks(saves, ranks_of(HashStore()), record) == [None, None]
    for rank, save in enumerate(saves):
        assert save.stage is Stage.FAILED
        told = commit_module.reason(save, rank)
        assert told.startswith(f"rank {number}: ")
        assert f"rank{number}{UNFINISHED}" in told


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


@pytest.mark.parametrize(("folder", "tag"), [("link", "tag"), ("real", "./tag"), ("real", "x")])
def test_a_place_that_has_two_names_is_one(tmp_path, folder, tag):
    (tmp_path / "real" / "tag").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "real" / "x").symlink_to(tmp_path / "real" / "tag")
    first = Record(Target(tmp_path / "real", "tag", is_latest=True), "1")
    with pytest.raises(CheckpointError, match="is saving it already"):
        Record(Target(tmp_path / folder, tag, is_latest=True), "2")
    first.close()


def test_a_lock_does_not_outlive_its_save_in_a_child_of_fork(tmp_path):
    record = Record(Target(tmp_path, "tag", is_latest=True), "id")
    of_child = os.dup(record._number)
    record.close()
    (told,) = recover(tmp_path, removes=True)
    os.close(of_child)
    assert "was being saved when its process ended" in told
    assert names_in(tmp_path) == []


def test_a_record_that_another_process_looks_at_is_locked_once_it_has_looked(tmp_path, monkeypatch):
    """It took it for that of a process that was killed, since it was not locked yet."""
    lock, path = commit_module._lock, tmp_path / f"id{RECORD}"
    others = [lambda: path.unlink(), lambda: None]

    def lock_second(number):
        if others:
            others.pop()()
            return BlockingIOError(errno.EWOULDBLOCK, "is locked") if others else lock(number)
        return lock(number)

    monkeypatch.setattr(commit_module, "_lock", lock_second)
    monkeypatch.setattr(commit_module, "POLL_S", 0)
    record = Record(Target(tmp_path, "tag", is_latest=True), "id")
    assert others == []
    assert recover(tmp_path, removes=True) == []
    assert path.exists()
    record.close()


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
    save = BackgroundSave([[state]], [0], 10**6)
    (root / tag).mkdir(exist_ok=True)
    for name in FILES:
        save.add({"masters": state}, root / tag / name)
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
        is_new = torch.equal(found, state)
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
            wrong += [] if torch.equal(found, state) or not found.any() else ["torn"]
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
    assert read_latest(tmp_path) == (None if is_changed else "tag")
    assert a.exists() is not is_changed
