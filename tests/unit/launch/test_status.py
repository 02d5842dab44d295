import json
import shutil

import pytest

from configs import cli
from configs.errors import ConfigError
from launch.records import Driver
from launch.status import main, sweep_status


@pytest.fixture
def sweep(tmp_path):
    """A sweep folder with one run of each kind, two points still to come."""
    folder = tmp_path / "mine"
    names = ["done", "broken", "going", "gone", "to come"]
    points = [{"name": n, "engine": "vanilla", "point_key": n, "repeats": 1} for n in names]
    points.append({"name": "elsewhere", "engine": "vanilla", "point_key": "e", "repeats": 1})
    runs = [{"name": "elsewhere", "repeat": 1, "status": "ok", "run_dir": "../other/s/run-001"}]
    folder.mkdir()
    index = {"name": "mine", "points": points, "runs": runs}
    (folder / "sweep.json").write_text(json.dumps(index))
    alive = vars(Driver.this_process())
    for name, status, driver in (
        ("done", "ok", None),
        ("broken", "oom-host", None),
        ("going", "running", alive),
        ("gone", "running", alive | {"boot_id": "an earlier one"}),
    ):
        path = folder / name / "run-001"
        path.mkdir(parents=True)
        run = {
            "point": {"name": name, "engine": "vanilla", "iterations": 20},
            "point_key": name,
            "setup_key": "s",
            "log": "x.log",
        }
        (path / "run.json").write_text(json.dumps(run))
        fields = {"status": status, "seconds": 8.0, "cause": "why\x1b[31m", "driver": driver}
        (path / "status.json").write_text(json.dumps(fields))
        line = {"event": "iteration", "iteration": 7, "iteration_ms": 500.0, "loss": 8.5}
        (path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    return folder


def test_every_run_that_is_asked_for_has_a_status(sweep):
    found = {run["name"]: run["status"] for run in sweep_status(sweep)["runs"]}
    assert found == {
        "done": "ok",
        "broken": "oom-host",
        "going": "running",
        "gone": "interrupted",
        "to come": "pending",
        "elsewhere": "ok",
    }


def test_the_text_shows_progress_and_causes_and_nothing_unprintable(sweep, capsys):
    assert main([str(sweep.parent)]) == 1  # something failed
    out = capsys.readouterr().out
    assert "mine: 2 ok, 1 oom-host, 1 running, 1 interrupted, 1 pending" in out
    assert "going      iteration 7 of 20, 0.5 s each, loss 8.5000" in out
    assert "broken     why?[31m" in out
    assert "done       8 s, last loss 8.5000" in out
    assert "\x1b" not in out


def test_json_is_for_programs(sweep, capsys):
    main([str(sweep), "--json"])
    (found,) = json.loads(capsys.readouterr().out)
    assert found["counts"]["pending"] == 1
    assert found["runs"][2]["iteration"] == 7


def test_a_sweep_without_failures_gives_zero(sweep, capsys):
    for name in ("broken", "gone"):
        status = sweep / name / "run-001" / "status.json"
        status.write_text(json.dumps({"status": "ok"}))
    assert main([str(sweep)]) == 0


def test_what_is_no_sweep_or_only_simulated_is_said(tmp_path):
    for _ in range(2):
        with pytest.raises(ConfigError, match="no sweep was run in it"):
            main([str(tmp_path)])
        folder = tmp_path / "simulated-h100x4" / "stride"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "sweep.json").write_text(json.dumps({"name": "stride", "source": "simulated"}))


def test_sweeps_of_other_studies_are_shown_and_simulated_ones_are_not(sweep, capsys):
    for name in ("own/theirs", "simulated-h100x4/models"):
        (sweep.parent / name).mkdir(parents=True)
        (sweep.parent / name / "sweep.json").write_text(json.dumps({"name": name, "points": []}))
    main([str(sweep.parent)])
    out = capsys.readouterr().out
    assert "own/theirs: " in out
    assert "mine: " in out
    assert "simulated" not in out


def test_runs_that_no_sweep_asked_for_are_shown(sweep, capsys):
    """Those of launch.run, also of another study, each point's newest."""
    for folder in (sweep.parent / "single", sweep.parent / "own" / "single"):
        shutil.copytree(sweep, folder)
        (folder / "sweep.json").unlink()
        again = folder / "broken" / "run-002"
        shutil.copytree(folder / "broken" / "run-001", again)
        run = json.loads((again / "run.json").read_text()) | {"started": "2026-01-01T00:00:00"}
        (again / "run.json").write_text(json.dumps(run))
        (again / "status.json").write_text(json.dumps({"status": "ok", "seconds": 9.0}))
    main([str(sweep.parent)])
    out = capsys.readouterr().out
    assert out.count("single: 2 ok, 1 running, 1 interrupted  (") == 2
    assert out.count("ok          broken  9 s, last loss 8.5000") == 2
    main([str(sweep.parent / "single")])
    assert "going   iteration 7 of 20" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["{not json", "[1]", '{"points": 3}', '{"runs": [7]}'])
def test_without_an_index_that_can_be_read_the_runs_are_shown(sweep, capsys, text):
    (sweep / "sweep.json").write_text(text)
    assert main([str(sweep.parent)]) == 1
    assert "mine: 1 oom-host, 1 ok, 1 running, 1 interrupted  (" in capsys.readouterr().out


def test_paths_cannot_steer_the_terminal(sweep, capsys):
    odd = sweep.parent / "a\x1b[2Jb"
    sweep.rename(odd)
    main([str(odd)])
    assert "a?[2Jb)" in capsys.readouterr().out
    shutil.rmtree(odd)
    assert cli.run_command(lambda: main([str(odd)])) == 2
    captured = capsys.readouterr()
    assert "a?[2Jb: no sweep was run in it" in captured.err
    assert "\x1b" not in captured.out + captured.err
