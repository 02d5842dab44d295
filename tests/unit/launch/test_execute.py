import os
import shlex
import time
from pathlib import Path

import pytest

from configs.errors import ConfigError
from configs.study import make_point
from launch import execute
from launch.execute import companions
from launch.feasibility import Host
from launch.ops import ready_extensions
from launch.preview import describe
from launch.task import RunOptions, Task


@pytest.fixture
def point():
    return make_point({"model": "tiny"})


def test_data_that_are_not_there_are_named_before_a_run():
    point = make_point({"model": "tiny", "data_prefix": "/none/such"})
    with pytest.raises(ConfigError, match=r"no file '/none/such\.bin'"):
        describe(point, Host(2**34), RunOptions(Path("r"), "single"))


def test_a_dry_run_says_that_links_are_shaped_and_starts_the_run_behind_them():
    point = make_point({"model": "tiny", "dp": 2, "global_batch_size": 4, "link_mbit": 20})
    words = describe(point, Host(2**34), RunOptions(Path("r"), "single"))
    assert "\nlinks    20 Mbit/s links, shaped\n" in words
    assert "-m launch.links bridge 20 " in words
    plain = point.model_copy(update={"link_mbit": 0})
    assert "link" not in describe(plain, Host(2**34), RunOptions(Path("r"), "single"))


def lock(ops, age_s, op="cpu_adam"):
    path = ops / op / "lock"
    path.parent.mkdir(parents=True)
    path.touch()
    os.utime(path, (time.time() - age_s,) * 2)
    return path


def test_locks_are_named_and_stay_and_old_ones_are_gone_round(odd_dir, capsys):
    """Whoever holds one may be in another container, where nobody here can look for it."""
    ops, next_to = odd_dir / "ops", odd_dir / "ops-2"
    assert ready_extensions(ops) == ops
    assert ops.is_dir()
    young = lock(ops, 30)
    assert ready_extensions(ops) == ops
    assert f"{young}: cpu_adam has been locked for 30 s, and what needs it waits" in said(capsys)
    old = [lock(ops / "py311_cpu", 7200, "op"), lock(next_to, 1200)]
    assert ready_extensions(ops) == odd_dir / "ops-3"
    words = said(capsys)
    for path, age in zip(old, ("120 min", "20 min"), strict=True):
        assert f"{path}: {path.parent.name} has been locked for {age}, " in words
        assert f"if nobody builds {path.parent.name} any more: rm {shlex.quote(str(path))}" in words
    assert f"meanwhile ops are built and looked for in {odd_dir / 'ops-3'}" in words
    assert young.exists()
    assert all(path.exists() for path in old)


def said(capsys):
    return capsys.readouterr().out


def test_ranks_get_the_folder_that_is_free(point, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "ops"))
    lock(tmp_path / "ops", 7200)
    jobs = []

    def supervise(job, *_):
        jobs.append(job)
        raise SystemExit

    monkeypatch.setattr(execute, "supervise", supervise)
    options = RunOptions(tmp_path / "r", "single")
    (task,) = Task.each([point], options)
    with pytest.raises(SystemExit):
        execute.execute(task, options)
    assert jobs[0].environment["TORCH_EXTENSIONS_DIR"] == str(tmp_path / "ops-2")


def test_a_folder_of_ops_that_cannot_be_written_is_refused_by_name(tmp_path, monkeypatch):
    (tmp_path / "ops" / "cpu_adam").mkdir(parents=True)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"TORCH_EXTENSIONS_DIR = .*; name a folder of your own"):
        ready_extensions(tmp_path / "file" / "ops")
    monkeypatch.setattr(execute.os, "access", lambda path, _mode: path.name != "cpu_adam")
    with pytest.raises(ConfigError, match=r"you cannot write into '.*cpu_adam'.*; name a folder"):
        ready_extensions(tmp_path / "ops")


def test_each_gpu_of_the_ranks_has_a_hog(point, tmp_path, monkeypatch):
    machine = Host(host_free_bytes=2**40, gpu_free_bytes=(2**36,) * 4)
    monkeypatch.setattr(execute, "probe_machine", lambda: machine)
    point = point.model_copy(update={"hog_share": 0.4, "dp": 2, "device": "auto"})
    found = companions(point, tmp_path)
    assert [hog.name for hog in found] == ["the hog of cuda:0", "the hog of cuda:1"]
    assert [hog.ready.name for hog in found] == ["hog.json", "hog-1.json"]
