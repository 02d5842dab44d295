"""Starts a run on several nodes: ``python -m launch.nodes NODES_JSON``; the command of such a run.

Each node runs :mod:`launch.node_agent`, which gets its order on standard input and ends its ranks
when that is closed: so a run ends everywhere when one node fails, when this process is told to
stop, and when it is killed. No environment and no path goes through a shell, but the checkout's.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.files import ROOT
from launch.process.members import POLL_S
from launch.process.supervise import stop_requests

EXPORTED = (
    *("CUBLAS_", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_LAUNCH_BLOCKING", "DEEPSPEED_", "DS_"),
    *("FI_", "GLOO_", "KMP_", "LD_LIBRARY_PATH", "MKL_", "NCCL_", "OMP_", "PYTHON", "PYTORCH_"),
    *("TORCH", "TP_SOCKET_IFNAME", "TRITON_", "UCX_", "WANDB_"),
)
"""How the names of variables begin that ranks on other hosts get from here."""
GRACE_S = 8.0
"""Time for the nodes to end after one has; shorter than the supervisor's."""
SSH_FAILED = 255
"""Exit code of ``ssh`` itself."""

_OUTPUT = threading.Lock()


@dataclass
class Node:
    """A node that was started, or all of a Slurm job's."""

    host: str
    process: subprocess.Popen[bytes]
    relay: threading.Thread
    """Copies its output to ours, line by line."""


def exported(environment: Mapping[str, str]) -> dict[str, str]:
    """The part of an environment that ranks on other hosts need."""
    return {name: value for name, value in environment.items() if name.startswith(EXPORTED)}


def agent_command(start: Mapping[str, Any]) -> list[str]:
    """What to run here so that the agent runs there."""
    agent = [sys.executable, "-m", "launch.node_agent"]
    if not start["is_shell"]:
        return [*start["prefix"], *agent]
    return [*start["prefix"], f"cd {shlex.quote(str(ROOT))} && exec {shlex.join(agent)}"]


def start_node(start: Mapping[str, Any], order: Mapping[str, Any]) -> Node:
    """Start the agent of a node and give it its order.

    Raises:
        OSError: the remote shell is missing.
    """
    # The remote shell must outlive a SIGTERM to every process of the run: what it connects ends
    # in order when the agent's input is closed. Ignored signals stay ignored in what we start.
    previous = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        process = subprocess.Popen(
            agent_command(start),
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
    finally:
        signal.signal(signal.SIGTERM, previous)
    text = json.dumps({**order, "node": start["node"]}) + "\n"
    with contextlib.suppress(BrokenPipeError):  # it ended at once; its exit code says so
        assert process.stdin is not None
        process.stdin.write(text.encode())
        process.stdin.flush()
    relay = threading.Thread(target=_copy_lines, args=(process,), daemon=True)
    relay.start()
    return Node(start["host"], process, relay)


def _copy_lines(process: subprocess.Popen[bytes]) -> None:
    """Whole lines only: two nodes write at the same time."""
    assert process.stdout is not None
    for line in process.stdout:
        _write(line)


def run_nodes(starts: list[dict[str, Any]], order: Mapping[str, Any]) -> int:
    """Start every node; wait until all have ended or one has failed, then end the others.

    Returns:
        0, or the exit code of the node that failed first.
    """
    nodes: list[Node] = []
    with stop_requests() as stopped:
        try:
            for start in starts:
                nodes.append(start_node(start, order))
            return _wait(nodes, stopped)
        finally:
            _end(nodes)


def _wait(nodes: list[Node], stopped: list[int]) -> int:
    while not stopped:
        codes = {node.host: node.process.poll() for node in nodes}
        for host, code in codes.items():
            if code:
                hint = ": is it reachable, without a password? (try: ssh HOST hostname)"
                hint = hint if code == SSH_FAILED else ""
                _write(f"NodeError: host {host!r} ended with exit code {code}{hint}\n".encode())
                return 128 - code if code < 0 else code
        if all(code == 0 for code in codes.values()):
            return 0
        time.sleep(POLL_S)
    return 128 + stopped[0]


def _end(nodes: list[Node]) -> None:
    """Close every agent's input, which ends its ranks; kill what stays here after the grace."""
    for node in nodes:
        with contextlib.suppress(OSError):
            assert node.process.stdin is not None
            node.process.stdin.close()
    deadline = time.monotonic() + GRACE_S
    for node in nodes:
        try:
            node.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            node.process.kill()
            node.process.wait()
        node.relay.join(1.0)


def _write(line: bytes) -> None:
    with _OUTPUT:
        while line:
            line = line[os.write(1, line) :]


def main(path: Path) -> int:
    """Start what ``path`` says."""
    table = json.loads(path.read_text(encoding="utf-8"))
    order = {
        "commands": table["nodes"],
        "local_ranks": table["local_ranks"],
        "environment": exported(os.environ),
    }
    return run_nodes(table["starts"], order)


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1])))
