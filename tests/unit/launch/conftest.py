import sys
from pathlib import Path

import pytest

from configs.study import load_study
from configs.sweep import load_sweep
from deep_optimizer_states.predict.memory import GIB
from launch import task as task_module
from launch.backends.own import OwnTrainer
from launch.feasibility import HALF_TYPES, Host
from launch.process import monitor
from launch.sweep_runner import SweepPlan
from launch.task import RunOptions

FAKES = Path(__file__).resolve().parent / "fakes"
CPU = Host(20 * GIB)
OWN = """
extends = "interleaved"
title = "engines of mine"
[engines.gpu-only]
title = "on a GPU"
needs = ["gpu"]
"""


@pytest.fixture(autouse=True)
def every_half_type():
    """Asks no torch what the processor multiplies: tests are the same on every one.

    With patches of its own, since a test's are to be undone first.
    """
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr("launch.feasibility.ask_half_types", lambda: HALF_TYPES)
        yield


@pytest.fixture
def fake_trainer(monkeypatch):
    """Makes the module ``fake_trainer`` runnable by the ranks; call it to say how runs end."""
    monkeypatch.setenv("PYTHONPATH", str(FAKES))

    def choose(how: str) -> str:
        monkeypatch.setenv("FAKE_TRAINER", how)
        return "fake_trainer"

    return choose


@pytest.fixture(params=["plain", "with space", 'it\'s; "quoted" $HOME', "two\nlines"])
def odd_dir(request, tmp_path):
    path = tmp_path / request.param
    path.mkdir()
    return path


@pytest.fixture
def sleeper():
    """A process that has nothing to do with any run."""
    import subprocess

    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def plan(tmp_path, monkeypatch):
    """The basic sweep on a file of data, with runs ended by the fake trainer."""
    for end in (".bin", ".idx"):
        (tmp_path / f"data{end}").write_bytes(b"tokens")
    monkeypatch.setattr(task_module, "data_prefix", lambda given: str(tmp_path / "data"))
    monkeypatch.setattr(task_module, "prepared", lambda _name: str(tmp_path / "data"))
    monkeypatch.setattr(monitor, "LOOK_S", 0.01)  # half a second before each of many runs

    def make(trainer, sweep=None, machine=CPU):
        sweep = sweep or load_sweep("basic").small()
        points = [p.model_copy(update={"device": "cpu"}) for p in sweep.points("tiny")]
        options = RunOptions(tmp_path / "results", sweep.name, trainer=OwnTrainer(module=trainer))
        return SweepPlan(sweep, tuple(points), machine, options)

    return make


@pytest.fixture
def own(tmp_path):
    """A study with an engine that needs a GPU, and the paper's."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "study.toml").write_text(OWN)
    return load_study(tmp_path / "own")
