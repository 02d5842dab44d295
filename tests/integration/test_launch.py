"""The commands as a user types them, with a trainer that ends as the test asks."""

import json
import signal

import psutil
import pytest
from fake_runs import ROOT, finish, pids, run_dir, start, status
from processes import is_alive

from launch.process.watch import count_oom_kills

KILLED = "oom-host" if count_oom_kills() is None else "failed"
"""SIGKILL without an out-of-memory kill; without a counter nobody knows."""


def again(*values):
    """What stand-in programs and endings show in unit tests as well."""
    return pytest.param(*values, marks=pytest.mark.exhaustive)


@pytest.fixture
def results(tmp_path):
    """A folder whose name a shell would take apart."""
    return tmp_path / 'it\'s "two"\nlines; $HOME'


def test_a_good_run_leaves_its_whole_record(results):
    code, out, err = finish(start("ok", results, "--raw"))
    assert (code, err) == (0, "")
    assert status(results)["status"] == "ok"
    folder = run_dir(results)
    (log,) = folder.glob("log-*.log")
    assert log.name.removesuffix(".log") == folder.parent.name
    assert "rank 0 of 1 how ok" in log.read_text()
    assert f"cwd {ROOT.name}" in log.read_text()  # standard error is kept
    assert "rank 0 of 1 how ok" in out
    assert str(folder) in out
    run = json.loads((folder / "run.json").read_text())
    assert run["provenance"]["cpu"]["model"]


@pytest.mark.parametrize(
    ("how", "ranks", "code", "name", "cause"),
    [
        again("fail", "2", 1, "failed", "ValueError: the trainer's own words"),
        again("silent", "1", 1, "failed", "'end'"),
        again("killed", "1", 137, KILLED, "SIGKILL"),
        again("killed", "2", 1, KILLED, "SIGKILL"),
    ],
)
def test_a_bad_run_has_a_true_exit_code_and_a_cause(tmp_path, how, ranks, code, name, cause):
    got, _, err = finish(start(how, tmp_path / "r", "--dp", ranks))
    record = status(tmp_path / "r")
    assert (got, record["status"], record["exit_code"]) == (code, name, code)
    assert cause in record["cause"]
    assert cause in err
    assert record["last_lines"]


@pytest.mark.parametrize(("number", "ranks"), [again(signal.SIGINT, 1), again(signal.SIGTERM, 2)])
def test_a_signal_ends_every_process_of_the_run_and_no_other(tmp_path, sleeper, ranks, number):
    results = tmp_path / "r"
    process = start("hang", results, "--dp", str(ranks))
    numbers = pids(results, 2 * ranks)
    assert status(results)["status"] == "running"
    process.send_signal(number)
    assert finish(process)[0] == 128 + number
    assert not any(map(is_alive, numbers))
    assert sleeper.poll() is None
    assert status(results)["status"] == "interrupted"


@pytest.mark.exhaustive
def test_ranks_whose_launcher_was_killed_are_ended_too(tmp_path, sleeper):
    results = tmp_path / "r"
    process = start("hang", results, "--dp", "2")
    numbers = pids(results, 4)
    (torchrun,) = psutil.Process(process.pid).children()
    torchrun.kill()
    assert finish(process)[0] == 137
    assert not any(map(is_alive, numbers))
    assert sleeper.poll() is None
    assert status(results)["status"] == KILLED


def test_user_errors_are_one_line_and_exit_code_2(tmp_path):
    for point, arguments in (
        ("tinny", []),
        ("tiny", ["--model", "70B", "--dp", "1"]),
    ):
        code, out, err = finish(start("ok", tmp_path / "r", *arguments, point=point))
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert err.startswith("error: ")
    assert not (tmp_path / "r").exists()
