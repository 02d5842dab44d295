"""Under Trainer, Accelerate and Lightning: bitwise equal to stock, trained and resumed."""

import functools
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

WORKERS = {
    "transformers": "trainer_worker.py",
    "accelerate": "accelerate_worker.py",
    "lightning": "lightning_worker.py",
}
PACKAGES = {
    "transformers": ["transformers", "accelerate"],
    "accelerate": ["accelerate"],
    "lightning": ["lightning"],
}
# On a GPU one rank: that is what Lightning's own strategy, unchanged, can be shown with.
RANKS = {"cpu": 2, "gpu": 1}
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def reports_of(tmp_path_factory):
    """``reports_of(framework, device)`` -> the reports of its ranks; each job runs once."""

    @functools.cache
    def run(framework, device):
        return _run(WORKERS[framework], device, tmp_path_factory.mktemp(framework))

    return run


def _run(worker, device, folder):
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(RANKS[device]), str(Path(__file__).with_name(worker))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    done = subprocess.run(
        [*command, str(folder / "report"), str(folder)],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return [
        json.loads((folder / f"report.{rank}.json").read_text()) for rank in range(RANKS[device])
    ]


@pytest.mark.parametrize("device", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
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
def test_equals_stock(reports_of, framework, what, device):
    # Not importorskip: importing them here would take seconds, and they warn.
    if missing := [name for name in PACKAGES[framework] if not importlib.util.find_spec(name)]:
        pytest.skip(f"not installed: {', '.join(missing)}")
    for report in reports_of(framework, device):
        assert report[what] == []
