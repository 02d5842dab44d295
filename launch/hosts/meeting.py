"""How nodes that a user starts one by one find the run: the first node tells the others its folder.

They run the same ``python -m launch.run ... --nnodes N --node-rank I --master-addr A --master-port
P``. Node 0 makes the run folder, on a file system that all share, and waits at the port; the others
come, show that they mean the same point, and learn the path of its ``run.json``. Then torchrun
takes the port over.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

from configs.errors import ConfigError
from configs.schema import Point
from launch.records.run_folder import study_of

WAIT_S = 600.0
"""Longest time until all have come."""
RETRY_S = 0.5
LINE_BYTES = 65_536


def point_digest(run: dict[str, Any]) -> str:
    """Hash of what a ``run.json`` says of its point: the fields, and the study they belong to."""
    what = [run["point"], run["study"]]
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()


def host_meeting(port: int, num_nodes: int, run_json: Path, wait_s: float = WAIT_S) -> None:
    """Tell the other nodes where the run is; returns when all of them know.

    Raises:
        ConfigError: some did not come, or the port cannot be had.
    """
    wanted = point_digest(json.loads(run_json.read_text(encoding="utf-8")))
    missing = set(range(1, num_nodes))
    deadline = time.monotonic() + wait_s
    try:
        server = socket.create_server(("", port))
    except OSError as error:
        raise ConfigError(f"--master-port {port}: {error.strerror}") from None
    with server:
        while missing:
            server.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                connection, _ = server.accept()
            except TimeoutError:
                raise ConfigError(
                    f"after {wait_s:.0f} s these nodes have not come: {sorted(missing)}; start the "
                    "same command on them with their own --node-rank"
                ) from None
            with connection, contextlib.suppress(OSError, ValueError):
                missing -= _answer(connection, missing, wanted, run_json)


def _answer(connection: socket.socket, missing: set[int], wanted: str, run_json: Path) -> set[int]:
    """Answer who came; the node that now knows the run."""
    connection.settimeout(10)
    asked = _receive(connection)
    node = asked.get("node")
    if asked.get("point") != wanted:
        _send(connection, {"error": "its point is another one than node 0's"})
        return set()
    if node not in missing:
        _send(connection, {"error": f"node {node} is here already, or is none of this run"})
        return set()
    _send(connection, {"run_json": str(run_json)})
    return {node}


def join_meeting(address: str, port: int, node: int, point: Point, wait_s: float = WAIT_S) -> Path:
    """Ask node 0 for the run.

    Returns:
        Path of its ``run.json``.

    Raises:
        ConfigError: it does not answer in time, refuses, or its path is not one of this machine's.
    """
    deadline = time.monotonic() + wait_s
    digest = point_digest({"point": point.model_dump(mode="json"), "study": study_of(point)})
    while True:
        try:
            with socket.create_connection((address, port), timeout=10) as connection:
                _send(connection, {"node": node, "point": digest})
                answer = _receive(connection)
            break
        except (OSError, ValueError) as error:
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"--master-addr {address} --master-port {port}: node 0 does not answer: {error}"
                ) from None
            time.sleep(RETRY_S)
    if "run_json" not in answer:
        raise ConfigError(f"--node-rank {node}: node 0 refuses: {answer.get('error')}")
    path = Path(str(answer["run_json"]))
    _require_same_point(path, digest)
    return path


def _require_same_point(path: Path, digest: str) -> None:
    try:
        found = point_digest(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"node 0's run is in {str(path.parent)!r}, which cannot be read here ({error}); "
            "--results-dir must lie on a file system that all nodes share"
        ) from None
    if found != digest:
        raise ConfigError(f"{path} is not the point that was asked for")


def _send(connection: socket.socket, value: dict[str, Any]) -> None:
    connection.sendall(json.dumps(value).encode() + b"\n")


def _receive(connection: socket.socket) -> dict[str, Any]:
    with connection.makefile("rb") as file:
        value = json.loads(file.readline(LINE_BYTES))
    if not isinstance(value, dict):
        raise ValueError("not an object")
    return value


def main(arguments: list[str]) -> None:
    """``PORT NODES RUN_JSON COMMAND...``: meet, then become the command."""
    port, nodes, run_json, *command = arguments
    try:
        host_meeting(int(port), int(nodes), Path(run_json))
    except ConfigError as error:
        sys.stderr.write(f"ConfigError: {error}\n")
        raise SystemExit(2) from None
    os.execv(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
