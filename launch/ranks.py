"""The command and environment of a run's ranks."""

from __future__ import annotations

import math
import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

from launch.files import ROOT

TRAINER_MODULE = "launch.pretrain_gpt"


def free_port() -> int:
    """A TCP port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def ranks_command(run_json: Path, num_ranks: int, port: int, module: str) -> list[str]:
    """Start ``module`` on ``run_json``: plainly for one rank, under torchrun for more."""
    if num_ranks == 1:
        return [sys.executable, "-m", module, str(run_json)]
    torchrun = ["-m", "torch.distributed.run", f"--nproc-per-node={num_ranks}"]
    return [sys.executable, *torchrun, f"--master-port={port}", "-m", module, str(run_json)]


def ranks_environment(base: Mapping[str, str], num_ranks: int, port: int) -> dict[str, str]:
    """The ranks' environment: the caller's, with what DeepSpeed and OpenMP need made explicit.

    What the caller set stays: ``OMP_NUM_THREADS`` and ``TORCH_EXTENSIONS_DIR``.
    """
    environment = dict(base)
    # torchrun would leave one thread a rank, and the CPU's update runs on these threads.
    environment.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // num_ranks)))
    # Ops built for this environment, not one folder a user shared by all of them.
    environment.setdefault("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix) / "torch_extensions"))
    # The environment's own ninja before the system's: another version of it builds every op anew.
    own_tools = str(Path(sys.executable).parent)
    environment["PATH"] = os.pathsep.join([own_tools, base.get("PATH", os.defpath)])
    environment["PYTHONUNBUFFERED"] = "1"
    paths = [str(ROOT), str(ROOT / "src"), *filter(None, [base.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    environment["MASTER_ADDR"] = "127.0.0.1"
    environment["MASTER_PORT"] = str(port)
    if num_ranks == 1:
        environment.update(
            RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", NODE_RANK="0"
        )
    return environment


def usable_cores() -> int:
    """Cores this process may use: its affinity, cut by the container's quota."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return cores
    if quota == "max":
        return cores
    return max(1, min(cores, math.ceil(int(quota) / int(period))))
