"""Both benchmarks for real, in their small forms on the CPU."""

import json

import pytest
from programs import python


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_gpu_benchmark_in_its_small_form(tmp_path):
    results = tmp_path / "a folder"
    words = ("--study", "peers", "--sweep", "gpu", "--size", "tiny", "--iterations", "3")
    rows = "stock,dynamic-small-buckets,superoffload,zenflow"
    given = ("--device", "cpu", "--minutes", "14", "--results-dir", str(results))
    done = python("-m", "launch.sweep", *words, "--engines", rows, *given)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "equal to stock (3 losses, 3 gradient norms, weights and optimizer" in done.stdout
    folder = results / "peers" / "gpu"
    points = json.loads((folder / "sweep.json").read_text())["points"]
    lacking = "needs a GPU, and this run has none"
    assert [point.get("skipped") for point in points] == [*[None] * 3, lacking, lacking]


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_host_benchmark_on_few_elements():
    flags = ("--numel", "100003", "--width", "64", "--layers", "3", "--repeats", "2")
    done = python("-W", "ignore", "-m", "benchmarks.host", *flags, "--threads", "1")
    assert done.returncode == 0, done.stderr  # 1 where bits differ
    assert "stock with a GPU / fused" in done.stdout
    assert "withheld" not in done.stdout
    steps = [line for line in done.stderr.splitlines() if line.endswith(" ...")]
    assert len(steps) == 2
    assert all(line.startswith("bench-host: 1 thread(s): ") for line in steps)
