"""Engines that are dropped and processes that end leave nothing hanging."""

import json
import signal
from pathlib import Path

import pytest
from ranks import run_ranks

WORKER = Path(__file__).with_name("worker.py")
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
