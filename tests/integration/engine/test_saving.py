"""A checkpoint that a signal handler saves is whole, or is refused."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("saving_worker.py")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saving")
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*command, str(WORKER), str(folder / "report.json"), str(folder)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=180,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads((folder / "report.json").read_text())


def test_saved_while_forward_waits_for_the_update_it_is_the_state_of_stock(report):
    assert "before_gather" in report["forward"]["callers"]
    assert report["forward"]["error"] is None
    assert report["forward"]["differences"] == []


def test_saved_within_a_step_it_is_the_state_of_stock_or_is_refused(report):
    """The counters of the engine still say that the step is to come; its update has begun."""
    assert "step" in report["step"]["callers"]
    assert report["step"]["error"] or report["step"]["differences"] == []
