"""Three ranks behind links: ``start BYTES FOLDER`` starts them, ``rank BYTES FOLDER`` is one.

Rank 0 sends so many bytes, half to each of the others at the same time, and then they send it as
many. What it saw is in ``seen.json`` in the folder. With ``fail`` for BYTES, rank 0 raises an error
once it is behind its link.
"""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil

from launch.hosts import namespaces

PORT = 5000
ADDRESSES = ("10.0.0.2", "10.0.0.3")
"""Of ranks 1 and 2."""


def start(words):
    command = [sys.executable, "-m", namespaces.__name__, "rank", __file__, "rank", *words]
    first, *others = (
        subprocess.Popen(command, env={**os.environ, "LOCAL_RANK": str(number)})
        for number in range(3)
    )
    code = first.wait()
    for other in others:
        if code:
            other.kill()
        other.wait()
    return code


def rank(count, folder):
    number = int(os.environ["LOCAL_RANK"])
    (folder / f"namespace-{number}").write_text(str(Path("/proc/self/ns/net").stat().st_ino))
    if count == "fail":
        time.sleep(600 * number)
        raise ValueError("the rank's own words")
    if number:
        answer(ADDRESSES[number - 1], int(count) // 2)
    else:
        exchange(int(count), folder)


def answer(address, count):
    with socket.create_server((address, PORT)) as server:
        connection, _ = server.accept()
    with connection:
        receive(connection, count)
        connection.sendall(b"x")
        receive(connection, 1)
        connection.sendall(bytes(count))


def receive(connection, count):
    while count:
        count -= len(connection.recv(min(count, 2**20)))


def connect(address):
    while True:
        try:
            return socket.create_connection((address, PORT))
        except OSError:  # the other is not listening yet
            time.sleep(0.02)


def sent():
    return psutil.net_io_counters(pernic=True, nowrap=False)[namespaces.INTERFACE].bytes_sent


def at_once(connections, out, back):
    """Seconds until all have got ``out`` bytes and given ``back``."""

    def one(connection):
        connection.sendall(bytes(out))
        receive(connection, back)

    threads = [threading.Thread(target=one, args=(each,)) for each in connections]
    begin = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.monotonic() - begin


def exchange(count, folder):
    connections = [connect(address) for address in ADDRESSES]
    before = sent()
    seen = {"sending_s": at_once(connections, count // 2, 1), "kernel_bytes": sent() - before}
    seen["receiving_s"] = at_once(connections, 1, count // 2)
    seen["gloo"] = os.environ["GLOO_SOCKET_IFNAME"]
    seen["interfaces"] = sorted(psutil.net_if_addrs())
    (folder / "seen.json").write_text(json.dumps(seen))
    for connection in connections:
        connection.close()


if __name__ == "__main__":
    if sys.argv[1] == "start":
        sys.exit(start(sys.argv[2:]))
    rank(sys.argv[2], Path(sys.argv[3]))
