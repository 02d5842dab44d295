"""A run killed at any moment goes on from its last checkpoint exactly as stock would."""

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import wait_for
from ranks import free_port, rank_environment

WORKER = Path(__file__).with_name("killed_worker.py")
pytestmark = [pytest.mark.exhaustive, pytest.mark.slow, pytest.mark.timeout(900)]
KILLS = [2, 4]
"""SIGKILL and SIGTERM by turns."""
STEPS_PER_KILL = 25


def start(*arguments):
    environment = rank_environment(0, 1, free_port())
    command = [sys.executable, "-W", "ignore", str(WORKER), *map(str, arguments)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )


def finish(process):
    output, _ = process.communicate()
    assert process.returncode == 0, output[-4000:]


@pytest.mark.parametrize("kills", KILLS)
def test_a_run_killed_at_random_moments_ends_as_stock_does(tmp_path, kills):
    steps = kills * STEPS_PER_KILL
    dice, starts = random.Random(20241), tmp_path / "starts"
    for kill in range(kills):
        process = start("train", tmp_path, steps)

        def has_come_to(tag, process=process):
            assert process.poll() is None, process.stdout.read()[-4000:]
            return (tmp_path / tag).exists()

        wait_for(lambda kill=kill: has_come_to("starts") and len(starts.read_text().split()) > kill)
        last = int(starts.read_text().split()[-1]) + dice.randint(1, 8)
        (tmp_path / "wait at").write_text(str(last + 10))  # or it is over before it is killed
        wait_for(lambda last=last: has_come_to(f"global_step{last}"))
        time.sleep(dice.uniform(0.0, 0.2))
        process.send_signal((signal.SIGKILL, signal.SIGTERM)[kill % 2])
        process.communicate()
    (tmp_path / "wait at").write_text(str(steps))
    finish(start("train", tmp_path, steps))
    finish(start("replay", tmp_path, steps, tmp_path / "report.json"))
    report = json.loads((tmp_path / "report.json").read_text())
    assert len(report["starts"]) == kills + 1
    assert any(0 < step < steps for step in report["starts"]), "killed too early or too late"
    assert report["different"] == []
