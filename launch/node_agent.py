"""Runs one node's part of a run; started there by :mod:`launch.nodes`.

Its order is the first line of standard input: the commands of all nodes, the environment, and which
node this is. When the input ends, so does what it started. Output goes to standard output.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from configs.files import ROOT
from launch.hosts.ranks import node_environment
from launch.process.job import Job, Limits
from launch.process.supervise import supervise

LONGEST_ORDER_BYTES = 2**22


def read_order(fd: int) -> dict[str, Any]:
    """The first line of a file descriptor, nothing after it.

    Raises:
        EOFError: it ended before the line did.
    """
    text = b""
    while not text.endswith(b"\n"):
        # Byte by byte: what follows is for the thread that waits for the end.
        byte = os.read(fd, 1)
        if not byte or len(text) > LONGEST_ORDER_BYTES:
            raise EOFError("no order arrived: this is started by launch.nodes, not by hand")
        text += byte
    order: dict[str, Any] = json.loads(text)
    return order


def node_of(order: Mapping[str, Any], environment: Mapping[str, str]) -> int:
    """Which node this is; under ``srun``, Slurm says it."""
    node = order["node"]
    return int(environment["SLURM_NODEID"] if node is None else node)


def main() -> int:
    """Do the order; the exit code is that of the node's launcher."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        # Whatever the remote shell left: the ranks must be able to be ended.
        signal.signal(number, signal.SIG_DFL)
    order = read_order(0)
    node = node_of(order, os.environ)
    base = {**os.environ, **order["environment"]}
    environment = node_environment(base, order["local_ranks"][node])
    threading.Thread(target=_stop_at_end_of_input, daemon=True).start()
    with tempfile.TemporaryDirectory(prefix="node-") as folder:
        log = Path(folder) / "log"
        job = Job(order["commands"][node], ROOT, environment, log)
        ending = supervise(job, Limits(hang_s=0), echo=True)
    return 128 + ending.stop_signal if ending.stop_signal else ending.exit_code


def _stop_at_end_of_input() -> None:
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
