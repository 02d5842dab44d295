"""Links of a given rate between the ranks of one machine: whether they can be had, and the command.

How they are made: :mod:`launch.hosts.namespaces`.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys

from configs.schema import Point
from launch.fit.capacity import runs_on_gpu
from launch.fit.machine import Machine
from launch.hosts.launchers import TORCHRUN, Launcher

_PROGRAMS = ("ip", "tc", "unshare")
_PROBE = (
    "ip link add probe0 type veth peer name probe1"
    " && ip link add probe2 type bridge"
    " && tc qdisc add dev probe0 root handle 1: htb default 1"
)
"""What the links need, tried in a namespace that ends with it."""
_UNSHARED = ("unshare", "--net", "sh", "-c")


def lacks(point: Point, machine: Machine, launcher: Launcher, wandb: str | None) -> list[str]:
    """Why a point's links cannot be shaped, as one reason; empty where they can, or are not.

    Args:
        point: what is to be run.
        machine: where.
        launcher: who starts the ranks.
        wandb: project of Weights & Biases that scalars are to be sent to.
    """
    if not point.link_mbit:
        return []
    none = "give link_mbit = 0 for links as they are"
    if point.num_ranks == 1:
        reason = f"one rank has no link to another; {none}, or a dp or pp above 1"
    elif launcher.is_far:
        only = "links are shaped between ranks of one machine"
        reason = f"{only}; leave out --hostfile, --srun and --nnodes, or {none}"
    elif launcher.kind != TORCHRUN:
        only = "links are shaped between ranks that torchrun starts"
        reason = f"{only}; leave out --launcher {launcher.kind}, or {none}"
    elif runs_on_gpu(point, machine):
        reason = (
            "GPUs of one machine exchange through its memory, whatever links there are; give "
            f"device = 'cpu', or {none}"
        )
    elif wandb is not None:
        reason = f"ranks behind such links reach no other machine; leave out --wandb, or {none}"
    elif problem := unavailable():
        reason = f"{problem}; run it as root on a Linux with iproute2 and util-linux, or {none}"
    else:
        return []
    return [f"link_mbit = {point.link_mbit}: {reason}"]


@functools.cache
def unavailable() -> str:
    """Why this process cannot make links; empty where it can."""
    if sys.platform != "linux":
        return f"links are shaped by the kernel of Linux, and this is {sys.platform}"
    missing = [name for name in _PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"the command {missing[0]!r}, which shapes links, is not installed"
    if os.geteuid():
        return "only root may make network namespaces"
    command = [*_UNSHARED, _PROBE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if not done.returncode:
        return ""
    said = " ".join(done.stderr.split())
    return f"this kernel or container refuses network namespaces ({said})"
