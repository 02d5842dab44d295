"""The folder of compiled ops: stale locks, and a checkout that belongs to another user."""

import os
import pickle
import shutil
import tempfile
from pathlib import Path

import pytest
from torch.utils.file_baton import FileBaton

from configs.errors import ConfigError
from deep_optimizer_states import stale_locks
from launch.process import extensions
from launch.process.extensions import extensions_folder, ready_extensions

NOBODY = 65534


def as_another_user(function):
    """What ``function`` returns or raises in a process without root's rights.

    Files of this test's own folders are closed to another user by their modes; only root has to
    become one.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(NOBODY)
                os.setuid(NOBODY)
            answer = (function(), None)
        except BaseException as error:  # noqa: BLE001 - handed over to the test
            answer = (None, error)
        os.write(writer, pickle.dumps(answer))
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        value, error = pickle.loads(file.read())
    os.waitpid(child, 0)
    if error is not None:
        raise error
    return value


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    """Nobody is about to remove a lock here, whatever file system the tests lie on."""
    monkeypatch.setattr(stale_locks, "PAUSE_S", 0.0)
    monkeypatch.setattr(stale_locks, "_mount_of", lambda _: (Path("/"), "ext4"))


@pytest.fixture
def checkout(monkeypatch):
    """A folder that every user can reach: built ops that only their owner can write, a cache."""
    top = Path(tempfile.mkdtemp())  # pytest's own folders are closed to other users
    shared, cache = top / "it's shared" / "torch_extensions", top / "cache"
    op = shared / "cpu_adam"
    op.mkdir(parents=True)
    (op / "lock").touch()
    cache.mkdir()
    top.chmod(0o755)
    cache.chmod(0o777)
    for path in (op, shared):
        path.chmod(0o555)
    monkeypatch.setattr(extensions, "_shared_folder", lambda: shared)
    yield shared, cache
    for path in (shared, op):
        path.chmod(0o755)
    shutil.rmtree(top)


def test_another_user_gets_a_folder_of_their_own(checkout):
    shared, cache = checkout
    with pytest.raises(PermissionError):
        as_another_user(lambda: FileBaton(str(shared / "cpu_adam" / "other")).try_acquire())

    def ready():
        folder = extensions_folder({"XDG_CACHE_HOME": str(cache)})
        ready_extensions(folder)
        (folder / "cpu_adam").mkdir()
        return folder, FileBaton(str(folder / "cpu_adam" / "lock")).try_acquire()

    folder, locked = as_another_user(ready)
    assert locked
    assert folder.parent.parent == cache
    assert (shared / "cpu_adam" / "lock").exists()


def test_the_owner_keeps_the_environments_folder(checkout):
    shared, cache = checkout
    for path in (shared, shared / "cpu_adam"):
        path.chmod(0o755)
    assert extensions_folder({"XDG_CACHE_HOME": str(cache)}) == shared
    assert extensions_folder({"TORCH_EXTENSIONS_DIR": str(shared)}) == shared
    ready_extensions(shared)
    assert not (shared / "cpu_adam" / "lock").exists()
    assert list(cache.iterdir()) == []


def test_a_folder_that_the_caller_named_stays_and_is_refused_by_name(checkout):
    shared, _ = checkout
    named = shared.parent / "named"
    shutil.copytree(shared, named)

    def ready():
        folder = extensions_folder({"TORCH_EXTENSIONS_DIR": str(named)})
        ready_extensions(folder)

    with pytest.raises(ConfigError) as caught:
        as_another_user(ready)
    text = str(caught.value)
    assert text.startswith(f"TORCH_EXTENSIONS_DIR = {str(named)!r}: you cannot write into")
    assert text.endswith("name a folder of your own in TORCH_EXTENSIONS_DIR")
    for path in (named, named / "cpu_adam"):
        path.chmod(0o755)


def test_a_user_without_a_cache_is_told_what_to_do(checkout):
    shared, _ = checkout
    if os.geteuid() != 0:
        shared.parent.chmod(0o555)

    def ready():
        ready_extensions(extensions_folder({"XDG_CACHE_HOME": str(shared.parent / "none")}))

    with pytest.raises(ConfigError, match="Permission denied; name a folder of your own"):
        as_another_user(ready)
    shared.parent.chmod(0o755)


def test_locks_of_other_users_are_theirs_to_remove(checkout):
    shared, _ = checkout
    for path in (shared, shared / "cpu_adam"):
        path.chmod(0o777)
    if os.geteuid() != 0:
        pytest.skip("needs root, to have files of two users")
    path = shared.resolve() / "cpu_adam" / "lock"
    [said] = as_another_user(lambda: ready_extensions(shared))
    assert said.startswith(f"{path}: cpu_adam is locked, and what needs it waits.")
    assert "another user's" in said
    assert path.exists()
    assert ready_extensions(shared) == [
        f"{path}: removed; a build of cpu_adam that was killed left this lock"
    ]
    assert not path.exists()
