"""`make gpu-check` for real, as far as a CPU takes it in seconds."""

import json

import pytest
from programs import python


@pytest.mark.exhaustive
@pytest.mark.slow
def test_without_a_gpu_its_tests_are_skipped_and_the_summary_says_so(tmp_path):
    words = ("tests", "--folder", tmp_path / "found", "--out", tmp_path / "out")
    done = python("-m", "benchmarks.gpu_check", *words, PYTHONPATH="", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "NO GPU HERE" in done.stdout
    outcomes = json.loads((tmp_path / "found" / "summary.json").read_text())
    assert [*outcomes] == ["build", "tests"]
    assert outcomes["build"]["lines"] != []
    assert "skipped" in outcomes["tests"]["lines"][-1]
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        *("summary.txt", "build.log", "tests.log"),
    }
