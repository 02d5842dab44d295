"""A process that ends while a lane has work."""

import subprocess
import sys

WORKS_TO_THE_END = """
import torch
from deep_optimizer_states.core.device.emulated import Faults, _ThreadLane
lane = _ThreadLane("flush", Faults())
source, home = torch.ones(200_000), torch.empty(200_000)
for _ in range(2000):
    lane.submit("copy", lambda: home.copy_(source))
lane.submit("print", lambda: print("last"))
"""


def test_a_lane_ends_before_python_does():
    """A thread that is in torch when Python ends would abort the process (exit code 134)."""
    done = subprocess.run(
        [sys.executable, "-c", WORKS_TO_THE_END], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "last\n"), done.stderr
