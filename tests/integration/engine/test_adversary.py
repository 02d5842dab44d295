"""Odd models, uses, calls, settings, pairs, windows and mishaps: stock's bits, or told so.

Two policies, just-in-time forward, 1 rank and in part 2. `adversary_worker.py` runs the cases.
"""

import json
from pathlib import Path

import pytest
import torch
from ranks import run_ranks

WORKER = Path(__file__).with_name("adversary_worker.py")
RANKS = [1]
if not torch.cuda.is_available() or torch.cuda.device_count() > 1:
    RANKS.append(pytest.param(2, marks=pytest.mark.exhaustive))
POLICIES = ("stride 2", "dynamic")
NUM_CASES = {
    "models": {1: 8, 2: 6},
    "uses": {1: 8, 2: 8},
    "calls": {1: 15, 2: 8},
    "settings": {1: 19, 2: 7},
    "pairs": {1: 11, 2: 6},
    "windows": {1: 17, 2: 6},
    "mishaps": {1: 25, 2: 21},
}
CONTROLS = (
    "EMA of the weights",
    "GatheredParameters, update in flight",
    "generate, Mixtral, greedy",
)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module", params=RANKS)
def reports(request, tmp_path_factory):
    """Of each rank: ``"theme | case | policy"`` -> what differs."""
    folder = tmp_path_factory.mktemp(f"ranks{request.param}")
    run_ranks(WORKER, folder / "report", num_ranks=request.param)
    return [
        json.loads((folder / f"report.{rank}.json").read_text()) for rank in range(request.param)
    ]


def of_theme(report, theme):
    return {key: found for key, found in report.items() if key.startswith(f"{theme} | ")}


@pytest.mark.parametrize("theme", NUM_CASES)
def test_every_case_equals_stock(reports, theme):
    different = [
        {key: found for key, found in of_theme(report, theme).items() if found}
        for report in reports
    ]
    assert different == [{}] * len(reports)


@pytest.mark.parametrize("theme", NUM_CASES)
def test_no_case_was_left_out(reports, theme):
    expected = len(POLICIES) * NUM_CASES[theme][len(reports)]
    assert [len(of_theme(report, theme)) for report in reports] == [expected] * len(reports)


def test_the_user_is_told_once_that_stock_drops_gradients(reports):
    """Three windows of one run drop some; a run of stock itself says nothing."""
    assert reports[0]["told of dropped gradients"] == {"stock": 0, "stride 2": 1}


@pytest.mark.parametrize("case", CONTROLS)
@pytest.mark.skipif(torch.cuda.is_available(), reason="waits are left out of the emulated device")
def test_without_its_wait_a_reader_sees_other_weights(reports, case):
    """Negative control: the comparison sees what it is there to see."""
    if len(reports) == 1:
        assert reports[0][f"without | {case}"] != []
