"""Policies beside stock on real streams, in a size in which copies and kernels overlap."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import rank_environment

from launch.launchers import free_port

WORKER = Path(__file__).resolve().parents[1] / "integration" / "engine" / "worker.py"
pytestmark = pytest.mark.gpu


def test_six_policies_have_stocks_bits_where_copies_and_kernels_overlap(tmp_path):
    words = ("large", "all", tmp_path / "report", tmp_path)
    command = [sys.executable, "-W", "ignore", str(WORKER), *map(str, words)]
    subprocess.run(command, env=rank_environment(0, 1, free_port()), check=True)
    report = json.loads((tmp_path / "report.0").read_text())
    assert report["large"] == {"six policies": []}
