import importlib
import sys

import pytest

from configs.errors import ConfigError
from configs.study import make_point
from launch import execute
from launch.execute import companions
from launch.fit import Machine
from launch.task import scalar_environment


@pytest.fixture
def point():
    return make_point({"model": "tiny"})


def test_tensorboard_is_asked_for_where_it_is_installed(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "tensorboard", raising=False)
    assert scalar_environment(False) == {}
    (tmp_path / "tensorboard").mkdir()  # a folder of a run is no package
    with pytest.raises(ConfigError, match="--tensorboard: the package 'tensorboard' is not"):
        scalar_environment(True)
    (tmp_path / "tensorboard.py").touch()
    importlib.invalidate_caches()
    assert scalar_environment(True) == {"DOS_TENSORBOARD": "1"}


def test_a_point_without_a_share_has_no_hog(point, tmp_path):
    assert companions(point, tmp_path) == ()


def test_a_cpu_has_one_hog(point, tmp_path):
    point = point.model_copy(update={"hog_share": 0.4, "device": "cpu"})
    (hog,) = companions(point, tmp_path)
    assert hog.ready == tmp_path / "hog.json"
    assert hog.command[1:4] == ["-m", "launch.hog", "--share=0.4"]
    assert "--device=cpu" in hog.command
    assert f"--out={hog.ready}" in hog.command


def test_each_gpu_of_the_ranks_has_a_hog(point, tmp_path, monkeypatch):
    machine = Machine(host_free_bytes=2**40, gpu_free_bytes=(2**36,) * 4)
    monkeypatch.setattr(execute, "probe_machine", lambda: machine)
    point = point.model_copy(update={"hog_share": 0.4, "dp": 2, "device": "auto"})
    found = companions(point, tmp_path)
    assert [hog.name for hog in found] == ["the hog of cuda:0", "the hog of cuda:1"]
    assert [hog.ready.name for hog in found] == ["hog.json", "hog-1.json"]
