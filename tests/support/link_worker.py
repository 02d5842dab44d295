"""Two ranks behind links: ``start BYTES FOLDER`` starts them, ``rank BYTES FOLDER`` is one.

Rank 0 sends so many bytes to rank 1 and waits until they have come; what it saw is in ``seen.json``
in the folder. With ``fail`` for BYTES, rank 0 raises an error once it is behind its link.
"""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil

from launch.hosts import namespaces

PORT = 5000
RANK_1 = "10.0.0.2"


def start(words):
    command = [sys.executable, "-m", namespaces.__name__, "rank", __file__, "rank", *words]
    ranks = [
        subprocess.Popen(command, env={**os.environ, "LOCAL_RANK": str(number)})
        for number in range(2)
    ]
    if code := ranks[0].wait():
        ranks[1].kill()
    ranks[1].wait()
    return code


def rank(count, folder):
    number = int(os.environ["LOCAL_RANK"])
    (folder / f"namespace-{number}").write_text(str(Path("/proc/self/ns/net").stat().st_ino))
    if number == 1:
        listen(count)
    elif count == "fail":
        raise ValueError("the rank's own words")
    else:
        send(int(count), folder)


def listen(count):
    with socket.create_server((RANK_1, PORT)) as server:
        connection, _ = server.accept()
    with connection:
        left = int(count)
        while left:
            left -= len(connection.recv(min(left, 2**20)))
        connection.sendall(b"x")


def connect():
    while True:
        try:
            return socket.create_connection((RANK_1, PORT))
        except OSError:  # the other is not listening yet
            time.sleep(0.02)


def sent():
    return psutil.net_io_counters(pernic=True, nowrap=False)[namespaces.INTERFACE].bytes_sent


def send(count, folder):
    with connect() as connection:
        before, begin = sent(), time.monotonic()
        connection.sendall(bytes(count))
        connection.recv(1)
        seen = {"seconds": time.monotonic() - begin, "kernel_bytes": sent() - before}
    seen["gloo"] = os.environ["GLOO_SOCKET_IFNAME"]
    seen["interfaces"] = sorted(psutil.net_if_addrs())
    (folder / "seen.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    if sys.argv[1] == "start":
        sys.exit(start(sys.argv[2:]))
    rank(sys.argv[2], Path(sys.argv[3]))
