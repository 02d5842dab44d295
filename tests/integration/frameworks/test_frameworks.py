"""Trainer, Accelerate and Lightning: bitwise equal to stock, trained and resumed."""

import functools
import importlib.util
import json
from pathlib import Path

import pytest
from processes import python_path
from ranks import run_ranks

from configs.files import ROOT

WORKER = Path(__file__).with_name("worker.py")
PACKAGES = {
    "transformers": ["transformers", "accelerate"],
    "accelerate": ["accelerate"],
    "lightning": ["lightning"],
}
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def reports_of(tmp_path_factory):
    """``reports_of(framework, device, ranks)`` -> their reports; each job runs once."""

    @functools.cache
    def run(framework, device, num_ranks):
        return _run(framework, device, num_ranks, tmp_path_factory.mktemp(framework))

    return run


def _run(framework, device, num_ranks, folder):
    variables = {"PYTHONPATH": python_path(ROOT), "PYTHONWARNINGS": "ignore"}
    if device == "cpu":
        variables["CUDA_VISIBLE_DEVICES"] = ""
    words = (WORKER, framework, folder / "report", folder)
    run_ranks(*words, num_ranks=num_ranks, **variables)
    return [json.loads((folder / f"report.{rank}.json").read_text()) for rank in range(num_ranks)]


# What two ranks do otherwise than one, rows of `engine` show without a framework. On a GPU one
# rank: that is what Lightning's own strategy, unchanged, can be shown with.
@pytest.mark.parametrize(
    ("device", "num_ranks"),
    [
        ("cpu", 1),
        pytest.param("cpu", 2, marks=pytest.mark.exhaustive),
        pytest.param("gpu", 1, marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize(
    "what",
    [
        "train | stride-2",
        "train | all-host",
        "resume | stride-2 to stock",
        "resume | stock to stride-2",
    ],
)
@pytest.mark.parametrize(
    "framework",
    [
        # Trainer prepares its engine through Accelerate; Lightning trains in `test_imdb.py`.
        "transformers",
        pytest.param("accelerate", marks=pytest.mark.exhaustive),
        pytest.param("lightning", marks=pytest.mark.exhaustive),
    ],
)
def test_equals_stock(reports_of, framework, what, device, num_ranks):
    # Not importorskip: importing them here would take seconds, and they warn.
    if missing := [name for name in PACKAGES[framework] if not importlib.util.find_spec(name)]:
        pytest.skip(f"not installed: {', '.join(missing)}")
    for report in reports_of(framework, device, num_ranks):
        assert report[what] == []
