"""What DeepSpeed's users switch on and call: bitwise equal to stock. See `docs/settings.md`."""

import json
from pathlib import Path

import pytest
import torch
from ranks import run_ranks

WORKER = Path(__file__).with_name("settings_worker.py")
WAYS = [("few", 1), pytest.param(("all", 1), marks=pytest.mark.exhaustive)]
"""How many policies each setting is run under, one by turns or all; and ranks."""
if not torch.cuda.is_available() or torch.cuda.device_count() > 1:
    WAYS.append(pytest.param(("all", 2), marks=pytest.mark.exhaustive))
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module", params=WAYS, ids=str)
def reports(request, tmp_path_factory):
    """Of each rank: ``"feature | policy"`` -> what differs."""
    extent, num_ranks = request.param
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(WORKER, extent, folder / "report", folder, num_ranks=num_ranks)
    found = sorted(Path(folder).glob("report.*.json"))
    assert len(found) == num_ranks
    return [json.loads(path.read_text()) for path in found]


def test_every_setting_and_call_equals_stock(reports):
    different = [{key: found for key, found in report.items() if found} for report in reports]
    assert different == [{}] * len(reports)


def test_nothing_was_left_out(reports, request):
    """22 settings and calls, under one of three policies or all three."""
    num_policies = 3 if "'all'" in request.node.callspec.id else 1
    assert [len(report) for report in reports] == [num_policies * 22] * len(reports)
