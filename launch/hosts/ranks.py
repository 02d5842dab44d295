"""The command and environment of a run's ranks."""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from random import SystemRandom

from configs.errors import ConfigError
from configs.files import ROOT
from deep_optimizer_states.core.host import usable_cores
from launch.process.extensions import EXTENSIONS_VARIABLE, extensions_folder

_KERNELS_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST_PORT = 10_000
"""Lower ones belong to services more often."""
_MOST_KEPT = 64
_kept: list[socket.socket] = []
"""Names that keep the ports of the last calls from other processes of this project."""
TRAINER_MODULE = "launch.pretrain_gpt"


def free_port() -> int:
    """Return a TCP port that nobody listens on now.

    The kernel would give one of its own range, and give it again to any process that asks before
    the ranks, which start seconds later, listen on it. So it is drawn from below that range, and
    no other call gives it as long as this process lives.
    """
    try:
        end = int(_KERNELS_PORTS.read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        end = 0
    tries = 20 if end > _FIRST_PORT else 0
    below = [SystemRandom().randrange(_FIRST_PORT, end) for _ in range(tries)]
    for port in [*below, 0]:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            found: int = probe.getsockname()[1]
            _keep(found)
            return found
    raise ConfigError("no TCP port of 127.0.0.1 can be bound, and ranks meet at one")


def _keep(port: int) -> None:
    """Take a name of Linux's for a port; an error if somebody has it."""
    name = socket.socket(socket.AF_UNIX)
    try:
        name.bind(f"\0deep_optimizer_states/port/{port}")
    except OSError:
        name.close()
        raise
    _kept.append(name)
    atexit.register(name.close)
    if len(_kept) > _MOST_KEPT:
        _kept.pop(0).close()


@dataclass(frozen=True)
class Program:
    """What every rank runs."""

    name: str
    """A module, or the path of a script."""
    arguments: tuple[str, ...]
    run_json: Path
    """The run it belongs to."""
    is_module: bool = True

    @property
    def words(self) -> list[str]:
        """As Python and torchrun take it."""
        return [*(["-m"] if self.is_module else []), self.name, *self.arguments]


def ranks_command(program: Program, num_ranks: int, port: int) -> list[str]:
    """Start ``program`` on this machine: plainly for one rank, under torchrun for more."""
    if num_ranks == 1:
        return [sys.executable, *program.words]
    torchrun = ["-m", "torch.distributed.run", f"--nproc-per-node={num_ranks}"]
    return [sys.executable, *torchrun, f"--master-port={port}", *program.words]


def ranks_environment(base: Mapping[str, str], num_ranks: int, port: int) -> dict[str, str]:
    """Return the environment of a run whose ranks are all on this machine.

    What the caller set stays: ``OMP_NUM_THREADS`` and ``TORCH_EXTENSIONS_DIR``.
    """
    environment = node_environment(base, num_ranks)
    environment["MASTER_ADDR"] = "127.0.0.1"
    environment["MASTER_PORT"] = str(port)
    if num_ranks == 1:
        environment.update(
            RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", NODE_RANK="0"
        )
    return environment


def node_environment(base: Mapping[str, str], num_local_ranks: int) -> dict[str, str]:
    """Return the caller's environment, with what DeepSpeed and OpenMP need on any machine.

    Args:
        base: the caller's environment; its ``OMP_NUM_THREADS`` and ``TORCH_EXTENSIONS_DIR`` stay.
        num_local_ranks: ranks on this machine, at least 1.
    """
    environment = dict(base)
    # torchrun would leave one thread a rank, and the CPU's update runs on these threads.
    environment.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // num_local_ranks)))
    # Ops built for this environment, not one folder a user shared by all of them.
    environment[EXTENSIONS_VARIABLE] = str(extensions_folder(base))
    # The environment's own ninja before the system's: another version of it builds every op anew.
    own_tools = str(Path(sys.executable).parent)
    environment["PATH"] = os.pathsep.join([own_tools, base.get("PATH", os.defpath)])
    # NVML, and so the monitor, numbers GPUs by bus; CUDA would put the fastest first.
    environment.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    environment["PYTHONUNBUFFERED"] = "1"
    paths = [str(ROOT), str(ROOT / "src"), *filter(None, [base.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    return environment
