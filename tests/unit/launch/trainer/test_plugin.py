"""What the trainer makes of the plugin's block before DeepSpeed reads it."""

from pathlib import Path

import pytest

import deep_optimizer_states
from configs.study import make_point
from launch.trainer.runfile import RunFile
from launch.trainer.runtime import plugin_installed


@pytest.mark.parametrize("given", ["timeline", "/elsewhere/lanes", ""])
def test_a_timeline_of_a_relative_folder_lies_in_the_run_folder(tmp_path, monkeypatch, given):
    monkeypatch.setattr(deep_optimizer_states, "install", lambda: None)
    block = {"enabled": True, "policy": "dynamic", "timeline": given}
    config, point = {"deep_optimizer_states": block}, make_point({"model": "tiny"})
    with plugin_installed(RunFile(tmp_path, point, config, Path("data"), Path("metrics"))):
        pass
    assert block["timeline"] == (str(tmp_path / given) if given else "")
