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


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Makes packages of given names importable, and no others."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def make(*names):
        for name in names:
            (tmp_path / f"{name}.py").touch()

    for name in ("tensorboard", "wandb"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return make


def test_what_was_asked_for_goes_to_the_trainer(packages):
    packages("tensorboard", "wandb")
    assert scalar_environment(True, "my project") == {
        "DOS_TENSORBOARD": "1",
        "DOS_WANDB_PROJECT": "my project",
    }
    assert scalar_environment(False, None) == {}


@pytest.mark.parametrize(
    ("tensorboard", "wandb", "words"),
    [(False, "p", "--wandb: the package 'wandb'"), (True, None, "--tensorboard: the package")],
)
def test_a_missing_package_is_named_beforehand(monkeypatch, tmp_path, tensorboard, wandb, words):
    (tmp_path / "wandb").mkdir()  # what W&B leaves in a working directory is no package
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    for name in ("tensorboard", "wandb"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(ConfigError, match=words):
        scalar_environment(tensorboard, wandb)


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
