"""What this machine has free for a run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from deep_optimizer_states.memory import free_host_bytes

_PROBE = """
import json, torch
free = [torch.cuda.mem_get_info(i)[0] for i in range(torch.cuda.device_count())]
print(json.dumps(free))
"""
_DEVICE_FILES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")


@dataclass(frozen=True)
class Machine:
    """Free memory of the host and of each GPU that torch can use."""

    host_free_bytes: int
    """Memory that new processes can have, within the container's limit."""
    gpu_free_bytes: tuple[int, ...] = ()
    """Free memory of each GPU; empty without one."""


def probe_machine() -> Machine:
    """Look at this machine. Torch is asked in a process of its own, and only where a GPU can be."""
    return Machine(host_free_bytes=free_host_bytes(), gpu_free_bytes=_gpu_free_bytes())


def _gpu_free_bytes() -> tuple[int, ...]:
    if not any(Path(name).exists() for name in _DEVICE_FILES):
        return ()
    command = [sys.executable, "-c", _PROBE]
    environment = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", **os.environ}  # as the ranks number them
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=300, check=True
        )
        return tuple(json.loads(done.stdout.splitlines()[-1]))
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        # No torch, a torch for CPUs, or a driver that does not answer: the ranks would see none.
        return ()
