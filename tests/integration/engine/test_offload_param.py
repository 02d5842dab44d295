"""ZeRO-3 with ``offload_param``: weights are written where they live, once, and are never lost."""

import json
from pathlib import Path

import pytest
import torch
from ranks import run_ranks

WORKER = Path(__file__).with_name("offload_param_worker.py")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(torch.cuda.is_available(), reason="breaks the emulated device"),
]


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("offload_param")
    run_ranks(WORKER, folder / "out.json", folder)
    return json.loads((folder / "out.json").read_text())


@pytest.mark.parametrize("policy", ["all-host", "stride 2", "ratio 0.5", "dynamic"])
def test_weights_stay_in_stocks_memory_and_are_sent_nowhere(report, policy):
    found = report["homes"][policy]
    assert found["at home"]
    assert found["changed"]
    assert found["staging"] == 0
    assert "WTS" not in found["plan"]
    if policy == "all-host":
        assert "H2D" not in found["plan"]
        assert "D2H" not in found["plan"]


@pytest.mark.parametrize("wait", ["WEIGHTS_READY", "STEPPED", "PREFETCHED", "GRADS_FLUSHED"])
def test_without_a_wait_the_result_differs(report, wait):
    """Negative control."""
    assert report["controls"][wait] != []
    assert report["controls"][f"{wait}, kept"] == []


def test_checkpoints_go_from_and_to_stock_and_between_homes_of_the_weights(report):
    assert len(report["resumes"]) == 10
    assert not any(report["resumes"].values()), report["resumes"]


def test_what_stock_refuses_to_move_is_refused_in_its_words(report):
    assert report["moves"]["ours"] == report["moves"]["stock"]
    assert "not supported for offloaded parameters" in report["moves"]["ours"]


@pytest.mark.parametrize("failure", ["CPU lane, stride 2", "GPU lane, ratio 0.5"])
def test_a_failed_update_is_not_trained_on_until_a_checkpoint_is_loaded(report, failure):
    found = report["failures"][failure]
    assert "out of luck" in found["failing step"]
    for call in ("step", "forward", "save", "state_dict", "masters", "moments", "weights"):
        for answer in found[call]:
            assert answer.startswith("UpdateError"), (call, answer)
    assert found["loaded"] == "no error: True"
    assert found["differences"] == []
    assert found["saved after"] == "after"
    assert found["destroy"] == "no error: None"
