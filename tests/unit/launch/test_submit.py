import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from processes import wait_for

from configs.errors import ConfigError
from configs.files import ROOT
from launch.data import LaunchError
from launch.submit import main

FAKES = Path(__file__).resolve().parent / "fakes"
SWEEP = """
name = "two"
model = "tiny"
[point]
dp = {dp}
device = "cpu"
global_batch_size = 16
data_prefix = "{prefix}"
[[engines]]
engine = "vanilla"
[[engines]]
engine = "async-gradients"
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with a sweep in it, from which the batch systems can be reached."""
    folder = tmp_path / 'it\'s "here"\nnow'
    folder.mkdir()
    for end in (".bin", ".idx"):
        (tmp_path / f"data{end}").touch()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PATH", os.pathsep.join([str(FAKES), os.environ["PATH"]]))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(FAKES), str(ROOT / "src")]))
    monkeypatch.setenv("BATCH_LOG", str(tmp_path / "calls"))
    write_sweep(folder, 1)
    return folder


def write_sweep(folder, dp):
    text = SWEEP.format(dp=dp, prefix=folder.parent / "data")
    (folder / "my sweep.toml").write_text(text)


def submit(*words, scheduler="slurm", rest=()):
    fixed = ["--scheduler", scheduler, "--sweep", "my sweep.toml", "--results-dir", "res ults"]
    return main([*fixed, *words, "--", "--trainer-module", "fake_trainer", *rest])


def calls(place):
    path = place.parent / "calls"
    return [json.loads(line) for line in path.read_text().splitlines()]


def submission(place, number="001"):
    return place / "res ults" / "two" / "submissions" / number


@pytest.mark.parametrize(
    ("scheduler", "expected"),
    [
        (
            "slurm",
            [
                ["sbatch", "--parsable", "two-1-node.sh"],
                ["sbatch", "--parsable", "--dependency=afterany:100", "two-report.sh"],
            ],
        ),
        (
            "pbs",
            [
                ["qsub", "two-1-node.sh"],
                ["qsub", "-W", "depend=afterany:100[].server", "two-report.sh"],
            ],
        ),
        ("lsf", [["bsub"], ["bsub", "-w", "ended(100)"]]),
    ],
)
def test_an_array_is_submitted_and_a_report_after_it(place, scheduler, expected, capsys):
    assert submit(scheduler=scheduler) == 0
    assert calls(place) == expected
    record = json.loads((submission(place) / "submission.json").read_text())
    first, last = record["jobs"]
    assert first["points"] == ["tiny vanilla", "tiny async-gradients"]
    assert (last["after"], last["points"]) == ([first["id"]], [])
    assert [job["command"] for job in record["jobs"]] == expected
    assert first["id"] in capsys.readouterr().out


@pytest.mark.parametrize(
    ("types", "rest", "expected"),
    [
        (["bf16"], (), "--dtype bf16"),
        ([], (), "--dtype fp32"),
        ([], ("--dtype", "bf16"), "--dtype bf16"),
        ([], ("--set", "dtype=bf16"), "--set dtype=bf16"),
        ([], ("--model", "7B"), ""),
    ],
)
def test_every_node_takes_the_type_of_the_plan(place, monkeypatch, types, rest, expected):
    monkeypatch.setattr("launch.fit.ask_half_types", lambda: frozenset(types))
    assert submit(rest=rest) == 0
    for name in ("two-1-node.sh", "two-report.sh"):
        text = (submission(place) / name).read_text()
        assert text.count("dtype") == bool(expected)
        assert expected in text


@pytest.mark.parametrize("words", [(), ("--share-nodes",)])
def test_jobs_that_share_nodes_do_not_wait_for_each_others_turn(place, words):
    assert submit(*words) == 0
    text = (submission(place) / "two-1-node.sh").read_text()
    assert bool(re.search(r"--share(?![\w-])", text)) == bool(words)


def test_nothing_is_overwritten(place):
    assert submit() == submit() == 0
    assert (submission(place) / "two-1-node.sh").is_file()
    assert (submission(place, "002") / "two-1-node.sh").is_file()


def test_a_dry_run_shows_scripts_and_leaves_nothing(place, capsys):
    assert submit("--dry-run", "--account", "me") == 0
    assert capsys.readouterr().out.count("#SBATCH --account=me") == 2
    assert not (place / "res ults").exists()
    assert not (place.parent / "calls").exists()


def test_points_of_several_nodes_are_arrays_of_their_own(place):
    write_sweep(place, 8)
    assert submit("--gpus-per-node", "4") == 0
    text = (submission(place) / "two-2-nodes.sh").read_text()
    assert "#SBATCH --nodes=2\n" in text
    assert "--no-memory-check" in text
    assert "command+=(--launcher srun --nnodes 2)" in text


def test_what_a_batch_system_refuses_is_said_and_what_it_took_is_kept(place, monkeypatch):
    monkeypatch.setenv("BATCH_REFUSES", "--report-only")
    with pytest.raises(LaunchError, match="job violates the rules of this queue"):
        submit()
    record = json.loads((submission(place) / "submission.json").read_text())
    assert [job["id"] for job in record["jobs"]] == ["100"]


def test_a_missing_batch_system_is_said(place, monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(ConfigError, match="sbatch: no such program"):
        submit()


@pytest.mark.parametrize(
    ("words", "rest", "message"),
    [
        ([], ["--index", "1"], "--index cannot stand after"),
        ([], ["--report-only"], "--report-only cannot"),
        ([], ["--hostfile", "x"], "--hostfile cannot"),
        ([], ["--again"], "--again cannot"),
        ([], ["--nonsense"], "unknown option '--nonsense'"),
        ([], ["--only", "nothing"], "unknown point 'nothing'"),
        (["--account", "$(id)"], [], "--account"),
        (["--ranks-per-node", "3"], [], "cannot be shared out"),
        (["--gpus-per-node", "4"], ["--launcher", "deepspeed"], "choose who starts several nodes"),
    ],
)
def test_wrong_options_submit_nothing(place, words, rest, message):
    write_sweep(place, 8)
    with pytest.raises(ConfigError, match=message):
        submit(*words, rest=rest)
    assert not (place.parent / "calls").exists()


def test_a_sweep_that_leaves_its_model_open_needs_one(place):
    with pytest.raises(ConfigError, match="leaves its model to the machine"):
        main(["--scheduler", "slurm", "--sweep", "basic", "--dry-run"])
    words = ["--scheduler", "slurm", "--sweep", "basic", "--dry-run", "--", "--model", "7B"]
    assert main(words) == 0


def statuses(place):
    files = sorted((place / "res ults" / "two").glob("log-*/run-*/status.json"))
    return {file.parent.name: json.loads(file.read_text())["status"] for file in files}


def test_a_task_that_the_batch_system_ends_is_interrupted_and_goes_on_later(place, monkeypatch):
    assert submit() == 0
    script = submission(place) / "two-1-node.sh"
    environment = {**os.environ, "SLURM_ARRAY_TASK_ID": "2", "FAKE_TRAINER": "hang"}
    process = subprocess.Popen(["bash", str(script)], env=environment, stdout=subprocess.DEVNULL)
    wait_for(lambda: list(place.glob("res ults/two/log-*/run-001/pids-0")))
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 143
    assert statuses(place) == {"run-001": "interrupted"}
    environment["FAKE_TRAINER"] = "ok"
    done = subprocess.run(["bash", str(script)], env=environment, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert statuses(place) == {"run-001": "interrupted", "run-002": "ok"}


@pytest.mark.parametrize(
    ("scheduler", "run"),
    [
        ("slurm", "all"),
        pytest.param("pbs", "arrays", marks=pytest.mark.exhaustive),
        pytest.param("lsf", "arrays", marks=pytest.mark.exhaustive),
    ],
)
def test_tasks_run_every_point_and_the_report_comes_last(place, monkeypatch, scheduler, run):
    monkeypatch.setenv("BATCH_RUN", run)
    monkeypatch.setenv("FAKE_TRAINER", "ok")
    assert submit(scheduler=scheduler) == 0
    folder = place / "res ults" / "two"
    outputs = "".join(path.read_text() for path in submission(place).glob("out-*"))
    found = [json.loads(path.read_text()) for path in folder.glob("log-*/run-001/run.json")]
    engines = {run["point"]["engine"] for run in found}
    assert engines == {"vanilla", "async-gradients"}, outputs
    assert set(statuses(place).values()) == {"ok"}
    index = json.loads((folder / "sweep.json").read_text())
    assert len(index["runs"]) == 2
    if run == "all":
        assert "report" in (submission(place) / "out-101-1").read_text()
        assert (folder / "tables" / "runs.csv").is_file()


def test_help_needs_no_batch_system():
    done = subprocess.run(
        [sys.executable, "-m", "launch.submit", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0
    assert "--partition" in done.stdout
