"""What both trainers' programs do around training."""

import importlib

import pytest

from launch.hosts.ranks import TRAINER_MODULE
from launch.process.outcome import judge
from launch.process.supervise import Ending
from launch.trainers.pipeline import MODULE


@pytest.mark.parametrize("module", [TRAINER_MODULE, MODULE])
def test_what_the_user_has_to_mend_is_a_line_that_the_launcher_finds(module, capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    assert importlib.import_module(module).main(["/nowhere/run.json"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("pretrain_gpt: error: /nowhere/run.json: cannot be read:")
    assert judge(Ending(2, 1.0), [line], has_ended=False).cause == line
