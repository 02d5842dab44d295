"""Odd models, uses, calls, settings, pairs, windows and mishaps: stock's bits, or told so.

Two policies, just-in-time forward, 1 rank and in part 2. `adversary_worker.py` runs the cases.
"""

import json
from pathlib import Path

import pytest
import torch
from ranks import run_ranks

WORKER = Path(__file__).with_name("adversary_worker.py")
WAYS = [("few", 1), pytest.param(("all", 1), marks=pytest.mark.exhaustive)]
"""How many policies each case is run under, one by turns or both; and ranks."""
if not torch.cuda.is_available() or torch.cuda.device_count() > 1:
    WAYS.append(pytest.param(("all", 2), marks=pytest.mark.exhaustive))
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


@pytest.fixture(scope="module", params=WAYS, ids=str)
def reports(request, tmp_path_factory):
    """Of each rank: ``"theme | case | policy"`` -> what differs."""
    extent, num_ranks = request.param
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(WORKER, extent, folder / "report", num_ranks=num_ranks)
    return [json.loads((folder / f"report.{rank}.json").read_text()) for rank in range(num_ranks)]


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
def test_no_case_was_left_out(reports, theme, request):
    num_policies = len(POLICIES) if "'all'" in request.node.callspec.id else 1
    expected = num_policies * NUM_CASES[theme][len(reports)]
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
