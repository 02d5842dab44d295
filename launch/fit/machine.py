"""What this machine has free for a run."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deep_optimizer_states.memory import free_host_bytes

_PROBE = """
import json, torch
free = [torch.cuda.mem_get_info(i)[0] for i in range(torch.cuda.device_count())]
print(json.dumps(free))
"""
_ASK_TYPES = """
import json, torch
def multiplies(name):
    try:
        return bool(getattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported")())
    except (AttributeError, RuntimeError):
        return False  # a torch without oneDNN multiplies both in loops of its own
print(json.dumps([name for name in ("bf16", "fp16") if multiplies(name)]))
"""
HALF_TYPES = frozenset({"bf16", "fp16"})
"""Types of 16 bits, which not every processor multiplies natively."""
_DEVICE_FILES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")


def _every_half_type() -> frozenset[str]:
    return HALF_TYPES


@dataclass(frozen=True)
class Machine:
    """Free memory of the host and of each GPU that torch can use, and what its processor can do."""

    host_free_bytes: int
    """Memory that new processes can have, within the container's limit."""
    gpu_free_bytes: tuple[int, ...] = ()
    """Free memory of each GPU; empty without one."""
    half_types: Callable[[], frozenset[str]] = _every_half_type
    """Return the types of 16 bits for which torch has a native matrix product on the processor.

    A function, because asking torch takes seconds and few commands need the answer."""


def probe_machine() -> Machine:
    """Look at this machine. Torch is asked in a process of its own, and only where a GPU can be."""
    return Machine(free_host_bytes(), _gpu_free_bytes(), ask_half_types)


@functools.cache
def ask_half_types() -> frozenset[str]:
    """Ask torch, in a process of its own, which types of 16 bits the processor multiplies natively.

    Variables that restrict torch's kernels count, since the ranks get them too. Without an answer
    nothing is known against either type.
    """
    found = _asked_of_torch(_ASK_TYPES)
    return HALF_TYPES if found is None else frozenset(found)


def _gpu_free_bytes() -> tuple[int, ...]:
    if not any(Path(name).exists() for name in _DEVICE_FILES):
        return ()
    # No torch, a torch for CPUs, or a driver that does not answer: the ranks would see none.
    return tuple(_asked_of_torch(_PROBE) or ())


def _asked_of_torch(program: str) -> list[Any] | None:
    """Return the list that a program prints as JSON; None where it fails."""
    environment = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", **os.environ}  # as the ranks number them
    command = [sys.executable, "-c", program]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=300, check=True
        )
        return list(json.loads(done.stdout.splitlines()[-1]))
    except (OSError, subprocess.SubprocessError, ValueError, TypeError, IndexError):
        return None
