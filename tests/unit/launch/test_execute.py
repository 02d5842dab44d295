from pathlib import Path

import pytest

from configs.errors import ConfigError
from configs.study import make_point
from deep_optimizer_states import stale_locks
from launch import execute
from launch.execute import RunOptions, companions, describe, ready_extensions
from launch.fit import Machine


@pytest.fixture
def point():
    return make_point({"model": "tiny"})


def test_data_that_are_not_there_are_named_before_a_run():
    point = make_point({"model": "tiny", "data_prefix": "/none/such"})
    with pytest.raises(ConfigError, match=r"no file '/none/such\.bin'"):
        describe(point, Machine(2**34), RunOptions(Path("r"), "single"))


def test_a_dry_run_says_that_links_are_shaped_and_starts_the_run_behind_them():
    point = make_point({"model": "tiny", "dp": 2, "global_batch_size": 4, "link_mbit": 20})
    words = describe(point, Machine(2**34), RunOptions(Path("r"), "single"))
    assert "\nlinks    20 Mbit/s links, shaped\n" in words
    assert "-m launch.links bridge 20 " in words
    plain = point.model_copy(update={"link_mbit": 0})
    assert "link" not in describe(plain, Machine(2**34), RunOptions(Path("r"), "single"))


def test_locks_that_a_killed_build_left_are_removed(tmp_path, monkeypatch):
    lock = tmp_path / "ops" / "cpu_adam" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    # Whatever file system the tests lie on.
    monkeypatch.setattr(stale_locks, "_unseen", lambda *_: "")
    [said] = ready_extensions(tmp_path / "ops")
    assert said.endswith("removed; a build of cpu_adam that was killed left this lock")
    assert not lock.exists()
    assert ready_extensions(tmp_path / "none") == []
    assert (tmp_path / "none").is_dir()


def test_a_folder_of_ops_that_cannot_be_written_is_refused_by_name(tmp_path, monkeypatch):
    (tmp_path / "ops" / "cpu_adam").mkdir(parents=True)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"TORCH_EXTENSIONS_DIR = .*; name a folder of your own"):
        ready_extensions(tmp_path / "file" / "ops")
    monkeypatch.setattr(execute.os, "access", lambda path, _mode: path.name != "cpu_adam")
    with pytest.raises(ConfigError, match=r"you cannot write into '.*cpu_adam'.*; name a folder"):
        ready_extensions(tmp_path / "ops")


def test_each_gpu_of_the_ranks_has_a_hog(point, tmp_path, monkeypatch):
    machine = Machine(host_free_bytes=2**40, gpu_free_bytes=(2**36,) * 4)
    monkeypatch.setattr(execute, "probe_machine", lambda: machine)
    point = point.model_copy(update={"hog_share": 0.4, "dp": 2, "device": "auto"})
    found = companions(point, tmp_path)
    assert [hog.name for hog in found] == ["the hog of cuda:0", "the hog of cuda:1"]
    assert [hog.ready.name for hog in found] == ["hog.json", "hog-1.json"]
