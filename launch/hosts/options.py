"""Options that say where a run's ranks are started, by what, and which trainer they run."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import Protocol

from launch.hosts.launchers import KINDS, REMOTE_SHELL, TORCHRUN
from launch.trainers import OWN_TRAINER, TRAINERS


class _HasGroups(Protocol):
    def add_argument_group(self, title: str) -> argparse._ArgumentGroup: ...


def add_launch_options(parser: _HasGroups) -> None:
    """Options that ``Launcher.of`` and ``trainer_of`` read."""
    where = parser.add_argument_group(
        "where the ranks run (results and data must lie on a file system that all hosts share)"
    )
    where.add_argument(
        "--launcher", choices=KINDS, default=TORCHRUN, help="who starts them [default torchrun]"
    )
    where.add_argument(
        "--hostfile", type=Path, metavar="FILE", help="start them on these hosts: HOST slots=N"
    )
    where.add_argument(
        "--srun", action="store_true", help="start them on the nodes of the Slurm job we are in"
    )
    where.add_argument(
        "--autotuning",
        choices=("tune", "run"),
        help="let DeepSpeed's launcher look for a config first (it needs the package tabulate, "
        "drops the offload section, and chooses the micro-batch; what it finds is in the run's "
        "folder)",
    )
    where.add_argument(
        "--num-gpus",
        type=_number,
        metavar="N",
        help="ranks on each machine, GPUs or not: a point with another number of them is refused",
    )
    where.add_argument("--nnodes", type=_number, metavar="N", help="use N machines, equally")
    where.add_argument(
        "--node-rank",
        type=int,
        metavar="I",
        help="this machine is the I-th, from 0; start the same command on each",
    )
    where.add_argument("--master-addr", metavar="HOST", help="address of the first machine")
    where.add_argument(
        "--master-port", type=_port, metavar="P", help="port to meet at [default a free one]"
    )
    where.add_argument(
        "--remote-shell",
        default=shlex.join(REMOTE_SHELL),
        metavar="WORDS",
        help=f"runs a command on a host [default '{shlex.join(REMOTE_SHELL)}']",
    )
    trainer = parser.add_argument_group("what the ranks run")
    own = OWN_TRAINER.name
    trainer.add_argument(
        "--trainer", choices=TRAINERS, help=f"[default the study's only one, else {own}]"
    )
    # Two trainers may have an option in common.
    options = {flag: known.options[flag] for known in TRAINERS.values() for flag in known.options}
    for flag, settings in options.items():
        trainer.add_argument(flag, **settings)


def _number(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give a whole number, 1 or more")
    return value


def _port(text: str) -> int:
    value = int(text)
    if not 1024 <= value < 65_536:
        raise argparse.ArgumentTypeError(f"{text!r}: give a port from 1024 to 65535")
    return value
