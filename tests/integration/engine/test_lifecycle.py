"""A run that is dropped, ended or killed has the bits of stock, and leaves nothing hanging."""

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import wait_for
from ranks import free_port, rank_environment, run_ranks

WORKER = Path(__file__).with_name("worker.py")
STEPS_PER_KILL = 25
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def run(what, folder):
    out = folder / "report.json"
    run_ranks(WORKER, "ends", what, out, folder)
    return json.loads(out.read_text())


def test_engines_leave_nothing_behind_or_what_stock_leaves_and_six_threads(tmp_path):
    """DeepSpeed itself keeps every engine for ever, also after ``destroy()``."""
    left = run("left", tmp_path)
    ours, stock = left["dropped"], left["stock, dropped"]
    assert left["destroyed"]["threads"] == left["destroyed"]["files"] == 0
    assert ours["threads"] <= stock["threads"] + 6
    assert ours["files"] == stock["files"] == 0
    assert ours["optimizers"] <= stock["optimizers"]


def test_a_process_ends_with_an_update_in_flight(tmp_path):
    """Nobody calls ``destroy()``; a process that hangs is ended by the worker and called so."""
    assert run("ways", tmp_path) == {
        "at the end": 0,
        "after backward": 0,
        "an error": 1,
        "SystemExit from a handler": 3,
        "SIGTERM": -signal.SIGTERM,
    }


def start_training(folder):
    environment = rank_environment(0, 1, free_port())
    words = [str(word) for word in (WORKER, "ends", "train", folder / "report.json", folder)]
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("kills", [2, 4])  # SIGKILL and SIGTERM by turns
def test_a_run_killed_at_random_moments_ends_as_stock_does(tmp_path, kills):
    steps = kills * STEPS_PER_KILL
    (tmp_path / "steps").write_text(str(steps))
    dice, starts = random.Random(20241), tmp_path / "starts"
    for kill in range(kills):
        process = start_training(tmp_path)

        def has_come_to(name, process=process):
            assert process.poll() is None, process.stdout.read()[-4000:]
            return (tmp_path / name).exists()

        wait_for(lambda kill=kill: has_come_to("starts") and len(starts.read_text().split()) > kill)
        last = int(starts.read_text().split()[-1]) + dice.randint(1, 8)
        (tmp_path / "wait at").write_text(str(last + 10))  # or it is over before it is killed
        wait_for(lambda last=last: has_come_to(f"global_step{last}"))
        time.sleep(dice.uniform(0.0, 0.2))
        process.send_signal((signal.SIGKILL, signal.SIGTERM)[kill % 2])
        process.communicate()
    (tmp_path / "wait at").write_text(str(steps))
    process = start_training(tmp_path)
    output, _ = process.communicate()
    assert process.returncode == 0, output[-4000:]
    report = run("replay", tmp_path)
    assert len(report["starts"]) == kills + 1
    assert any(0 < step < steps for step in report["starts"]), "killed too early or too late"
    assert report["different"] == []
