"""Megatron GPT under the plugin against stock DeepSpeed: the same bits over DP 2 and TP 2."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
ENGINES = {
    "vanilla": [],
    "hybrid with a resident share": [
        "--engine",
        "hybrid",
        "--stride",
        "2",
        "--offload-ratio",
        "0.7",
    ],
}


def run_point(folder, ranks, engine):
    command = [sys.executable, "-m", "launch.run", "tiny", *ranks, *ENGINES[engine]]
    command += ["--global-batch-size", "4", "--micro-batch-size", "1", "--iterations", "4"]
    command += ["--results-dir", str(folder / engine), "--no-echo"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    (metrics,) = folder.glob(f"{engine}/single/*/run-001/metrics.jsonl")
    events = [json.loads(line) for line in metrics.read_text().splitlines()]
    losses = [event["loss"] for event in events if event["event"] == "iteration"]
    norms = [event["grad_norm"] for event in events if event["event"] == "iteration"]
    return losses, norms, events[-1]["weights_sha256"], events[-1]["optimizer_sha256"]


@pytest.mark.parametrize("ranks", [["--dp", "2"], ["--tp", "2"]], ids=["dp2", "tp2"])
def test_two_ranks_of_megatron_equal_stock(tmp_path, ranks):
    stock, ours = (run_point(tmp_path, ranks, engine) for engine in ENGINES)
    assert len(stock[0]) == 4
    assert None not in stock
    assert ours == stock
