"""Bitwise equality with stock DeepSpeed: losses, norms, master weights, moments, 16-bit weights."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

WORKER = Path(__file__).with_name("equality_worker.py")
CASES = [
    "bf16-clip-accumulation",
    "bf16-fp32-accumulation",
    "fp32",
    "two-groups-l2",
    "contiguous-all-reduce",
    "overlap",
]
POLICIES = ["all-host", "stride-1", "stride-2", "stride-3", "all-device"]
RANKS = [1, 2] if not torch.cuda.is_available() or torch.cuda.device_count() > 1 else [1]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """``[ranks][rank]`` -> report of that rank."""
    return {ranks: _run(ranks, tmp_path_factory.mktemp(f"ranks{ranks}")) for ranks in RANKS}


def _run(ranks, folder):
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), str(WORKER), str(folder / "report"), str(folder)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return [json.loads((folder / f"report.{rank}.json").read_text()) for rank in range(ranks)]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("case", CASES)
def test_policy_equals_stock(reports, case, policy, ranks):
    for report in reports[ranks]:
        assert report[f"{case} | {policy}"] == []


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("way", ["stock to stride-2", "stride-2 to stock", "stride-2 to stride-2"])
def test_resume_under_another_engine_equals_stock(reports, way, ranks):
    for report in reports[ranks]:
        assert report[f"resume | {way}"] == []


@pytest.mark.parametrize("wait", ["GRADS_FLUSHED", "GRAD_HOME", "PREFETCHED", "STEPPED"])
@pytest.mark.skipif(torch.cuda.is_available(), reason="waits are left out of the emulated device")
def test_without_a_wait_the_result_differs(reports, wait):
    assert reports[1][0][f"without | {wait}"] != []
