"""Compiled models: the bits of stock, and no graph broken where stock breaks none."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("compile_worker.py")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compile")
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*command, str(WORKER), str(folder / "report.json")],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(folder)},
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads((folder / "report.json").read_text())


@pytest.mark.parametrize("way", ["engine.compile()", "every layer", "inductor"])
def test_a_compiled_model_equals_stock_in_bits_and_graphs(report, way):
    assert report[way]["differences"] == []
    assert report[way]["graphs"] == report[way]["stock's graphs"]
    assert report[way]["graphs"][0] > 0


def test_the_comparison_finds_weights_that_were_gathered_too_early(report):
    """The negative control: without the wait of just-in-time forward the result is not stock's."""
    assert report["weights gathered too early"]
