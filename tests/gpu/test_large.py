"""Policies beside stock on real streams, in a size in which copies and kernels overlap."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import rank_environment

from launch.hosts.launchers import free_port

pytestmark = pytest.mark.gpu


def test_six_policies_have_stocks_bits_where_copies_and_kernels_overlap(tmp_path):
    out = tmp_path / "found.json"
    command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("large_worker.py"))]
    environment = rank_environment(0, 1, free_port())
    subprocess.run([*command, str(out)], env=environment, check=True)
    found = json.loads(out.read_text())
    assert len(found) == 6
    assert {name: differ for name, differ in found.items() if differ} == {}
