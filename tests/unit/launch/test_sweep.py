import json

import pytest

from configs.schema import make_point
from configs.sweep import load_sweep
from launch import sweep as module
from launch.capacity import GIB
from launch.machine import Machine
from launch.run import RunOptions
from launch.sweep import choose_model, main, run_all

BASIC = load_sweep("basic")
CPU = Machine(20 * GIB)
GPU = Machine(160 * GIB, (80 * GIB,))


@pytest.mark.parametrize(
    ("machine", "overrides", "model"),
    [(CPU, {}, "tiny"), (GPU, {}, "7B"), (GPU, {"device": "cpu"}, "tiny")],
)
def test_auto_is_tiny_on_a_cpu_and_the_largest_that_fits_on_a_gpu(machine, overrides, model):
    assert choose_model(BASIC, overrides, machine) == model


def test_a_model_that_is_named_is_not_replaced():
    assert choose_model(BASIC.model_copy(update={"model": "70B"}), {}, CPU) == "70B"


@pytest.fixture
def points(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "data_prefix", lambda given: str(tmp_path / "data"))
    return BASIC.points("tiny", {"device": "cpu"})


def _run(points, tmp_path, trainer):
    options = RunOptions(tmp_path / "results", "basic", trainer_module=trainer)
    return run_all(BASIC, points, options)


def test_a_run_that_fails_does_not_stop_the_others(points, tmp_path, fake_trainer, capsys):
    finished, signal_number = _run(points, tmp_path, fake_trainer("async-gradients=fail"))
    assert [run.outcome.status.status for run in finished] == ["ok", "failed", "ok"]
    assert signal_number == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "[1/3] tiny vanilla: started"
    assert out[1].startswith("[1/3] tiny vanilla: ok in ")
    assert out[1].endswith("last loss 7.0")
    assert "ValueError: the trainer's own words" in out[3]


def test_the_index_lists_the_newest_run_of_each_point(points, tmp_path, fake_trainer, capsys):
    for _ in range(2):
        _run(points, tmp_path, fake_trainer("ok"))
    folder = tmp_path / "results" / "basic"
    index = json.loads((folder / "sweep.json").read_text())
    assert (index["schema_version"], index["name"]) == (1, "basic")
    assert [run["name"] for run in index["runs"]] == [
        "tiny vanilla",
        "tiny async-gradients",
        "tiny hybrid stride 2",
    ]
    assert [run["engine"] for run in index["runs"]] == ["vanilla", "async-gradients", "hybrid"]
    for run in index["runs"]:
        assert run["run_dir"].endswith("/run-002")
        assert (folder / run["run_dir"] / run["log"]).is_file()
        saved = json.loads((folder / run["run_dir"] / "run.json").read_text())
        assert make_point(saved["point"]).engine.value == run["engine"]


def test_a_dry_run_makes_nothing(tmp_path, capsys):
    arguments = ["--dry-run", "--results-dir", str(tmp_path / "r"), "--device", "cpu"]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert out.count("point ") == 3
    assert out.count('"stage": 3') == 3
    assert '"policy": "all-host"' in out
    assert "predicted host" in out
    assert not (tmp_path / "r").exists()


def test_the_list_has_every_sweep_and_point(capsys):
    assert main(["--list"]) == 0
    out = capsys.readouterr().out
    assert "  basic " in out
    assert "  tiny-hybrid " in out
