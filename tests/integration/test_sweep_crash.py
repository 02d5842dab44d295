"""A sweep whose launcher is killed: nothing of it stays alive, and the next call goes on."""

import json
import os
import signal
import subprocess
import sys

import pytest
from fake_runs import FAKES, ROOT
from processes import is_alive, wait_for


@pytest.fixture
def sweep(tmp_path):
    """Starts a sweep of three points on the fake trainer."""
    for end in (".bin", ".idx"):
        (tmp_path / f"data{end}").touch()
    file = tmp_path / "mine.toml"
    file.write_text(
        'name = "mine"\nmodel = "tiny"\n'
        f'point = {{ data_prefix = "{tmp_path}/data", dtype = "fp32" }}\n'
        'engines = [{engine = "v"}, {engine = "a"}, {engine = "h", stride = 2}]\n'
    )

    def start(how, *options):
        command = [sys.executable, "-m", "launch.sweep", "--sweep", str(file), "--size", "full"]
        command += ["--results-dir", str(tmp_path / "r"), "--trainer-module", "fake_trainer"]
        return subprocess.Popen(
            [*command, *options],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(FAKES), "FAKE_TRAINER": how},
            stdout=subprocess.PIPE,
            text=True,
        )

    start.folder = tmp_path / "r" / "mine"
    return start


def statuses(folder):
    index = json.loads((folder / "sweep.json").read_text())
    return [run["status"] for run in index["runs"]]


def test_kill_9_of_the_launcher_costs_the_running_point_alone(sweep):
    first = sweep("all-host=hang")
    (pids,) = wait_for(lambda: list(sweep.folder.glob("*/run-001/pids-0")))
    ranks = [int(pid) for pid in wait_for(pids.read_text).split()]
    first.kill()
    first.wait()
    first.stdout.close()
    assert all(map(is_alive, ranks))  # orphans, as after a crash
    second = sweep("ok", "--no-report")
    out, _ = second.communicate()
    assert second.returncode == 0
    assert "[1/3] tiny stock: done before" in out
    assert "left over" in out
    assert not any(map(is_alive, ranks))
    assert "3 runs: 2 ok, 1 ok before and not run again" in out
    assert statuses(sweep.folder) == ["ok", "ok", "ok"]
    interrupted = [p for p in sweep.folder.glob("*/run-001/status.json") if "gone" in p.read_text()]
    assert len(interrupted) == 1  # the run that was lost is kept, and says so


@pytest.mark.exhaustive
def test_two_launchers_do_not_run_the_same_point(sweep):
    first = sweep("all-host=hang")
    wait_for(lambda: list(sweep.folder.glob("*/run-001/pids-0")))
    second = sweep("ok", "--no-report")
    try:
        lines = []
        for line in second.stdout:
            lines.append(line)
            if "waits for its turn" in line:
                break
        out = "".join(lines)
        assert "tiny all-host: is running now" in out
        assert "stride 2: waits for its turn" in out
        assert first.poll() is None
        assert len(list(sweep.folder.glob("*/run-*"))) == 2
    finally:
        first.send_signal(signal.SIGTERM)
        first.communicate()
    out += second.communicate()[0]
    assert "stride 2: ok" in out
    assert sorted(statuses(sweep.folder)) == ["interrupted", "ok", "ok"]
    assert first.returncode == 128 + signal.SIGTERM


def test_ctrl_c_keeps_what_is_done_and_makes_no_report(sweep):
    process = sweep("all-host=hang")
    wait_for(lambda: list(sweep.folder.glob("*/run-001/pids-0")))
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate()
    assert process.returncode == 130
    assert "3 runs: 1 ok, 1 interrupted" in out
    assert "the same command goes on" in out
    assert not (sweep.folder / "report.md").exists()
    assert sorted(statuses(sweep.folder)) == ["interrupted", "ok"]
