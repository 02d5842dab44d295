"""Processes that end leave nothing hanging, whatever is in flight."""

import json
import signal
from pathlib import Path

import pytest
from ranks import run_ranks

WORKER = Path(__file__).with_name("worker.py")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_a_process_ends_with_an_update_in_flight(tmp_path):
    """Nobody calls ``destroy()``; a process that hangs is ended by the worker and called so."""
    run_ranks(WORKER, "ends", "ways", tmp_path / "report", tmp_path)
    assert json.loads((tmp_path / "report").read_text()) == {
        "at the end": 0,
        "after backward": 0,
        "an error": 1,
        "SystemExit from a handler": 3,
        "SIGTERM": -signal.SIGTERM,
    }
