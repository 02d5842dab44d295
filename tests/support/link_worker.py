"""One of two ranks behind links: ``NAME BYTES FOLDER`` of the run, FOLDER being of all runs.

Rank 0 sends to rank 1 until it, or rank 0 of another of ``RUNS``, has sent so many bytes, and
writes what it saw into ``NAME.json``.
"""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import psutil
from processes import wait_for

from launch.links import INTERFACE

RUNS = ("slow", "fast")
PORT = 5000
FIRST_ADDRESS, SECOND_ADDRESS = "10.0.0.1", "10.0.0.2"


def sent():
    return psutil.net_io_counters(pernic=True, nowrap=False)[INTERFACE].bytes_sent


def receive(name):
    with socket.create_server((SECOND_ADDRESS, PORT)) as server:
        connection, _ = server.accept()
    with connection:
        connection.sendall(name.encode())
        while connection.recv(2**20):
            pass


def connect():
    try:
        return socket.create_connection((SECOND_ADDRESS, PORT))
    except OSError:  # the other is not listening yet
        return None


def send(name, most, folder):
    over = folder / "over"
    with wait_for(connect) as connection:
        peer = connection.recv(100).decode()
        (folder / f"{name}-ready").touch()
        wait_for(lambda: all((folder / f"{run}-ready").exists() for run in RUNS))
        before, given = sent(), 0
        while given < most and not over.exists():
            connection.sendall(bytes(2**16))
            given += 2**16
        over.touch()
        seen = {"kernel_bytes": sent() - before, "peer": peer}
    ask = ["tc", "class", "show", "dev"]
    at_bridge = ["nsenter", f"--net=/proc/{os.getppid()}/ns/net"]
    seen["shaped"] = [said([*ask, INTERFACE]), said([*at_bridge, *ask, "port0"])]
    seen["gloo"] = os.environ["GLOO_SOCKET_IFNAME"]
    seen["addresses"] = [
        one.address
        for of_one in psutil.net_if_addrs().values()
        for one in of_one
        if one.family == socket.AF_INET
    ]
    (folder / f"{name}.json").write_text(json.dumps(seen))


def said(command):
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    run, count, place = sys.argv[1:]
    if os.environ["LOCAL_RANK"] == "0":
        send(run, int(count), Path(place))
    else:
        receive(run)
