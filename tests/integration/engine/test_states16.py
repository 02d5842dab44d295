"""Checkpoints of 16-bit states go from stock to this engine and back, bit for bit."""

import json
from pathlib import Path

import pytest
from ranks import run_ranks

WORKER = Path(__file__).with_name("states16_worker.py")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("states16")
    run_ranks(WORKER, folder / "report.json", folder)
    return json.loads((folder / "report.json").read_text())


@pytest.mark.parametrize("way", ["stock to stride 2", "stride 2 to stock", "stride 2 to stride 2"])
@pytest.mark.parametrize("states", ["bf16", "moments fp32"])
def test_training_goes_on_as_stocks_does(report, states, way):
    assert report[f"{states}: {way}"] == []


def test_moments_that_stay_fp32_after_loading_are_seen(report):
    """Negative control: stock goes on with moments in the type of the master weights."""
    assert report["without narrowing"]


def test_stock_makes_its_own_moments_after_a_checkpoint_from_before_the_first_update(report):
    assert report["fresh"] == []


def test_gradients_read_between_steps_are_stocks(report):
    """Before and after steps, of parameters that took no part as well."""
    assert report["gradients"] == []
