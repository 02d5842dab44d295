"""What interrupts, forks, drops or ends a run leaves the bits of stock, and nothing hanging."""

import json
import signal
from pathlib import Path

import pytest
from ranks import run_ranks

WORKER = Path(__file__).with_name("lifecycle_worker.py")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    out = tmp_path_factory.mktemp("lifecycle") / "report.json"
    run_ranks(WORKER, "compare", out)
    return json.loads(out.read_text())


@pytest.fixture(scope="module")
def statuses(tmp_path_factory):
    out = tmp_path_factory.mktemp("lifecycle") / "statuses.json"
    run_ranks(WORKER, "leave", out)
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
def test_a_process_ends_with_an_update_in_flight(statuses, how, status):
    """Nobody calls ``destroy()``; a process that hangs is ended by the worker and called so."""
    assert statuses[how] == status
