"""What DeepSpeed's users switch on and call: bitwise equal to stock. See `docs/settings.md`."""

import json
from pathlib import Path

import pytest
import torch
from ranks import run_ranks

WORKER = Path(__file__).with_name("settings_worker.py")
RANKS = [1]
if not torch.cuda.is_available() or torch.cuda.device_count() > 1:
    RANKS.append(pytest.param(2, marks=pytest.mark.exhaustive))
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module", params=RANKS)
def reports(request, tmp_path_factory):
    """Of each rank: ``"feature | policy"`` -> what differs."""
    folder = tmp_path_factory.mktemp(f"ranks{request.param}")
    run_ranks(WORKER, folder / "report", folder, num_ranks=request.param)
    found = sorted(Path(folder).glob("report.*.json"))
    assert len(found) == request.param
    return [json.loads(path.read_text()) for path in found]


def test_every_setting_and_call_equals_stock(reports):
    different = [{key: found for key, found in report.items() if found} for report in reports]
    assert different == [{}] * len(reports)


def test_nothing_was_left_out(reports):
    """Three policies on 22 settings and calls."""
    assert [len(report) for report in reports] == [3 * 22] * len(reports)
