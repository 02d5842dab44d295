"""Universal checkpoints: saved by two ranks, loaded by one, under stock and under the plugin."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

WORKER = Path(__file__).with_name("universal_worker.py")
WAYS = ["stock to stride-2", "stride-2 to stock", "stride-2 to stride-2"]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(torch.cuda.device_count() == 1, reason="two ranks need two GPUs or none"),
]


def run(module, *arguments):
    command = [sys.executable, "-W", "ignore", "-m", module, *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("universal")
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node")
    run(*torchrun, 2, WORKER, "save", folder)
    for engine in ("stock", "stride-2"):
        step = folder / engine / "step3"
        convert = ["--input_folder", step, "--output_folder", f"{step}_universal"]
        workers = ["--num_extract_workers", 1, "--num_merge_workers", 1]
        run("deepspeed.checkpoint.ds_to_universal", *convert, *workers)
    run(*torchrun, 1, WORKER, "load", folder, folder / "report.json")
    return json.loads((folder / "report.json").read_text())


@pytest.mark.parametrize("way", WAYS)
def test_training_goes_on_as_stocks_does(report, way):
    assert report[way] == []
