"""A run killed at any moment goes on from its last checkpoint exactly as stock would."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import wait_for

WORKER = Path(__file__).with_name("killed_worker.py")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
KILLS = 4


def start(*arguments):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        **{"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "OMP_NUM_THREADS": "1"},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
    }
    command = [sys.executable, "-W", "ignore", str(WORKER), *map(str, arguments)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )


def finish(process):
    output, _ = process.communicate()
    assert process.returncode == 0, output[-4000:]


def test_a_run_killed_at_random_moments_ends_as_stock_does(tmp_path):
    dice, starts = random.Random(20241), tmp_path / "starts"
    for kill in range(KILLS):
        process = start("train", tmp_path)

        def has_come_to(tag, process=process):
            assert process.poll() is None, process.stdout.read()[-4000:]
            return (tmp_path / tag).exists()

        wait_for(lambda kill=kill: has_come_to("starts") and len(starts.read_text().split()) > kill)
        last = int(starts.read_text().split()[-1]) + dice.randint(1, 8)
        wait_for(lambda last=last: has_come_to(f"global_step{last}"))
        time.sleep(dice.uniform(0.0, 0.2))
        process.send_signal((signal.SIGKILL, signal.SIGTERM)[kill % 2])
        process.communicate()
    finish(start("train", tmp_path))
    finish(start("replay", tmp_path, tmp_path / "report.json"))
    report = json.loads((tmp_path / "report.json").read_text())
    assert len(report["starts"]) == KILLS + 1
    assert any(0 < step < 100 for step in report["starts"]), "killed too early or too late"
    assert report["different"] == []
