"""Files of the plugin that cannot be written: one warning, and training goes on."""

import json
from pathlib import Path

import pytest
from ranks import run_ranks

WORKER = Path(__file__).with_name("diagnostics_worker.py")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    out = tmp_path_factory.mktemp("diagnostics") / "report.json"
    run_ranks(WORKER, out)
    return json.loads(out.read_text())


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("vanished", ["vanishing/rank-0.jsonl", "No such file or directory", "training goes on"]),
        ("full", ["full/rank-0.jsonl", "No space left on device", "training goes on"]),
        ("never there", ["file/folder", "Not a directory", "training goes on"]),
        ("no kernel", ["file/extensions", "Not a directory", "TORCH_EXTENSIONS_DIR"]),
    ],
)
def test_it_is_said_once_and_training_goes_on_with_the_same_bits(report, case, words):
    (warning,) = report[case]["warnings"]
    assert all(word in warning for word in words), warning
    assert report[case]["weights"] == report["none"]["weights"]


def test_nothing_is_said_when_nothing_is_wrong(report):
    assert report["none"]["warnings"] == []
    assert [len(weights) for weights in report["none"]["weights"]] == [64, 8] * 4
