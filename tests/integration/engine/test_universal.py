"""Universal checkpoints: saved by two ranks, loaded by one, under stock and under the plugin."""

import json
from pathlib import Path

import pytest
import torch
from ranks import run_ranks

WORKER = Path(__file__).with_name("universal_worker.py")
WAYS = ["stock to stride-2", "stride-2 to stock", "stride-2 to stride-2"]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(torch.cuda.device_count() == 1, reason="two ranks need two GPUs or none"),
]


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("universal")
    run_ranks(WORKER, "save", folder, num_ranks=2)
    run_ranks(WORKER, "load", folder, folder / "report.json")
    return json.loads((folder / "report.json").read_text())


@pytest.mark.parametrize("way", WAYS)
def test_training_goes_on_as_stocks_does(report, way):
    assert report[way] == []
