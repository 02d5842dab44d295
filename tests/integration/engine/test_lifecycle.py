"""What interrupts, forks, drops or ends a run leaves the bits of stock, and nothing hanging."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("lifecycle_worker.py")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def run_worker(*arguments):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        **{"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "OMP_NUM_THREADS": "1"},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
    }
    command = [sys.executable, "-W", "ignore", str(WORKER), *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment, timeout=280
    )


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    out = tmp_path_factory.mktemp("lifecycle") / "report.json"
    done = run_worker("compare", str(out))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(out.read_text())


def test_training_goes_on_as_stock_does_whatever_disturbed_it(report):
    assert len(report["differences"]) == 9
    assert not any(report["differences"].values()), report["differences"]


def test_a_destroyed_engine_leaves_no_thread_and_no_file(report):
    assert report["destroyed"]["threads"] == report["destroyed"]["files"] == 0


def test_a_dropped_engine_leaves_what_stock_leaves_and_its_own_six_threads(report):
    """DeepSpeed itself keeps every engine for ever, also after ``destroy()``."""
    ours, stock = report["dropped"], report["stock, dropped"]
    assert ours["threads"] <= stock["threads"] + 6
    assert ours["files"] == stock["files"] == 0
    assert ours["optimizers"] <= stock["optimizers"]


@pytest.mark.parametrize(
    ("how", "status"),
    [
        ("at the end", 0),
        ("after backward", 0),
        ("an error", 1),
        ("SystemExit from a handler", 3),
        ("SIGTERM", -signal.SIGTERM),
    ],
)
def test_a_process_ends_with_an_update_in_flight(how, status):
    """Nobody calls ``destroy()``; a hang would run into the time limit."""
    done = run_worker("leave", how)
    assert done.returncode == status, done.stdout[-2000:] + done.stderr[-4000:]
