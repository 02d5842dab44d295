"""Locks of compiled ops: those that a killed build left go, those that somebody holds stay."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest
from processes import wait_for

from deep_optimizer_states import stale_locks
from deep_optimizer_states.stale_locks import clear_stale_locks, locks_watched

HOLD = (
    "import os, sys; os.open(sys.argv[1], os.O_CREAT | os.O_EXCL);"
    "print(flush=True); sys.stdin.read()"
)
"""Takes a lock as torch does, and keeps it until its input ends."""
PIPES = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    monkeypatch.setattr(stale_locks, "PAUSE_S", 0.0)
    # Whatever file system the tests lie on.
    monkeypatch.setattr(stale_locks, "_file_system_of", lambda _: "ext4")


@pytest.fixture
def odd_dir(tmp_path):
    path = tmp_path / "it's an odd dir"
    path.mkdir()
    return path


@pytest.fixture
def lock(odd_dir):
    """A lock that no process holds, beside the op."""
    path = odd_dir / "left" / "lock"
    path.parent.mkdir()
    (path.parent / "op.so").touch()
    path.touch()
    return path


def removed(path):
    return [f"{path}: removed; a build of {path.parent.name} that was killed left this lock"]


def test_a_lock_that_nobody_holds_goes_and_a_held_one_stays(odd_dir, lock):
    held = odd_dir / "py311_cpu" / "held" / "lock"  # where torch has ops by default
    held.parent.mkdir(parents=True)
    with subprocess.Popen([sys.executable, "-c", HOLD, str(held)], **PIPES) as builder:
        builder.stdout.readline()
        waits = f"{held}: process {builder.pid} is building held, and what needs it waits for that"
        assert set(clear_stale_locks(odd_dir)) == {*removed(lock), waits}
        assert (lock.exists(), held.exists()) == (False, True)
        builder.stdin.close()
    assert clear_stale_locks(odd_dir) == removed(held)
    assert [path.name for path in lock.parent.iterdir()] == ["op.so"]
    assert clear_stale_locks(odd_dir) == clear_stale_locks(odd_dir / "none") == []


def test_a_build_outlives_the_process_that_started_it(odd_dir, lock):
    ninja = odd_dir / "ninja"
    ninja.write_text("#!/bin/sh\necho\nread -r line\n")
    ninja.chmod(0o755)
    with subprocess.Popen([ninja], cwd=lock.parent, **PIPES) as builder:
        builder.stdout.readline()
        [said] = clear_stale_locks(odd_dir)
        assert f"process {builder.pid} is building left" in said
        assert lock.exists()
        builder.stdin.close()
    assert clear_stale_locks(odd_dir) == removed(lock)


def test_a_lock_that_is_let_go_or_taken_anew_meanwhile_is_left_alone(odd_dir, lock, monkeypatch):
    """torch closes its lock before it removes it, and the next builder makes another at once."""
    monkeypatch.setattr(stale_locks.time, "sleep", lambda _: lock.unlink())
    assert clear_stale_locks(odd_dir) == []

    def take_anew(_):
        os.link(lock, odd_dir / "keeps its inode")
        lock.unlink()
        lock.touch()

    def take_anew_with_the_same_inode(_):
        before = lock.stat().st_ctime_ns
        while lock.stat().st_ctime_ns == before:
            lock.chmod(0o644)

    lock.touch()
    for meanwhile in (take_anew, take_anew_with_the_same_inode):
        monkeypatch.setattr(stale_locks.time, "sleep", meanwhile)
        assert clear_stale_locks(odd_dir) == []
        assert lock.exists()


def test_one_process_at_a_time_judges_a_folders_locks(odd_dir, lock, monkeypatch):
    """A second one might remove what a builder makes in place of what the first removed."""
    other = os.open(odd_dir, os.O_RDONLY)

    def judge_too(_):
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)

    monkeypatch.setattr(stale_locks.time, "sleep", judge_too)
    assert clear_stale_locks(odd_dir) == removed(lock)
    fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(other)


@pytest.mark.parametrize("is_of_another_user", [True, False])
def test_a_lock_that_whoever_cannot_be_seen_may_hold_stays(
    odd_dir, lock, monkeypatch, is_of_another_user
):
    why = "other machines may write to its file system (nfs4)"
    if is_of_another_user:
        why = "it is another user's, whose processes cannot be looked into"
        monkeypatch.setattr(stale_locks.os, "geteuid", lambda: lock.stat().st_uid + 1)
        look = stale_locks._look
        monkeypatch.setattr(stale_locks, "_look", lambda root: (look(root)[0], False))
    else:
        monkeypatch.setattr(stale_locks, "_file_system_of", lambda _: "nfs4")
    [said] = clear_stale_locks(odd_dir)
    assert said.startswith(f"{lock}: left is locked, and what needs it waits. ")
    assert said.endswith(f"but {why}. If nobody builds left, remove this file")
    assert lock.exists()


def test_a_lock_that_is_left_while_others_wait_goes_too(odd_dir, lock, monkeypatch):
    looks, said = [], []

    def look(root):
        looks.append(root)
        return clear_stale_locks(root)

    monkeypatch.setattr(stale_locks, "LOOK_S", 0.01)
    monkeypatch.setattr(stale_locks, "clear_stale_locks", look)
    with lock.open(), locks_watched(odd_dir, said.append):
        wait_for(lambda: len(looks) > 3)
    assert said == []  # who builds an op need not be told of it
    lock.unlink()
    with subprocess.Popen([sys.executable, "-c", HOLD, str(lock)], **PIPES) as builder:
        builder.stdout.readline()
        looks.clear()
        with locks_watched(odd_dir, said.append):
            wait_for(lambda: len(looks) > 3)
        builder.stdin.close()
    assert said == [
        f"{lock}: process {builder.pid} is building left, and what needs it waits for that"
    ]
    with locks_watched(odd_dir, said.append):
        wait_for(lambda: not lock.exists())
        wait_for(lambda: len(said) > 1)
    assert said[1:] == removed(lock)


def test_the_file_system_of_a_path_is_the_innermost(monkeypatch):
    monkeypatch.undo()
    assert stale_locks._file_system_of(Path("/proc/self/status")) == "proc"
