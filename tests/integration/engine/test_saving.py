"""A checkpoint that a signal handler saves is whole, or is refused."""

import json
from pathlib import Path

import pytest
from ranks import run_ranks

WORKER = Path(__file__).with_name("saving_worker.py")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saving")
    run_ranks(WORKER, folder / "report.json", folder)
    return json.loads((folder / "report.json").read_text())


def test_saved_while_forward_waits_for_the_update_it_is_the_state_of_stock(report):
    assert "before_gather" in report["forward"]["callers"]
    assert report["forward"]["error"] is None
    assert report["forward"]["differences"] == []


def test_saved_within_a_step_it_is_the_state_of_stock_or_is_refused(report):
    """The counters of the engine still say that the step is to come; its update has begun."""
    assert "step" in report["step"]["callers"]
    assert report["step"]["error"] or report["step"]["differences"] == []
