"""Both benchmarks for real, in their small forms on the CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]


def run(module, *flags, **environment):
    path = os.pathsep.join(map(str, (REPO, REPO / "src")))
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", module, *flags],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_gpu_benchmark_in_its_small_form(tmp_path):
    path = tmp_path / "a folder" / "figures.json"
    path.parent.mkdir()
    flags = ("--device", "cpu", "--small", "--rounds", "1", "--iterations", "2", "--warm-up", "1")
    rows = ("--rows", "just-in-time", "superoffload")
    done = run("benchmarks.gpu", *flags, *rows, "--json", str(path))
    assert done.returncode == 0, done.stderr
    found = {row["name"]: row for row in json.loads(path.read_text())["rows"]}
    assert found["just-in-time"]["verdict"] == "equal"
    assert found["just-in-time"]["rounds"][0]["digests"]["moments"]
    assert found["stock"]["update_s"]["repeats"] == 2
    assert found["stock"]["parameters"] > 1_000_000
    assert "only supports NVIDIA CUDA GPUs" in found["superoffload"]["failed"]
    assert "SuperOffload" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_host_benchmark_on_few_elements(tmp_path):
    path = tmp_path / "figures.json"
    flags = ("--numel", "100003", "--width", "64", "--layers", "3", "--repeats", "2")
    done = run("benchmarks.host", *flags, "--threads", "1", "--json", str(path))
    assert done.returncode == 0, done.stderr
    (result,) = json.loads(path.read_text())["results"]
    assert result["passes"]["equal"]
    assert set(result["engines"]["equal"].values()) == {True}
    assert "stock with a GPU / fused" in done.stdout
