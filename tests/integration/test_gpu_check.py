"""`make gpu-check` for real, as far as a CPU takes it in seconds."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_without_a_gpu_its_tests_are_skipped_and_the_summary_says_so(tmp_path):
    folders = ("--folder", str(tmp_path / "found"), "--out", str(tmp_path / "out"))
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_check", "tests", *folders],
        cwd=REPO,
        env={**os.environ, "PYTHONPATH": "", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "NO GPU HERE" in done.stdout
    outcomes = json.loads((tmp_path / "found" / "summary.json").read_text())
    assert [*outcomes] == ["build", "tests"]
    assert outcomes["build"]["lines"] != []
    assert "skipped" in outcomes["tests"]["lines"][-1]
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        *("summary.txt", "build.log", "tests.log"),
    }
