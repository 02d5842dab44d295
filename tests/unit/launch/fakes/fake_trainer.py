"""Stands in the trainer's place to end a run in every way a run can end.

``FAKE_TRAINER`` says how: ``ok``, ``fail``, ``silent``, ``killed``, ``hang``,
``stuck`` (in a Python function, after two iterations), ``stopped`` (rank 0 by SIGSTOP, after two),
``host-memory`` (a limit of its address space), ``allocator`` (torch's words), ``greedy`` (2 GiB of
pages), ``full`` (the disk of its folder), ``nan``, ``frozen`` and ``falls`` (to the end, with such
a loss in the log); or ``ENGINE=HOW`` pairs with commas between, ``ok`` for the engines it does not
name.
"""

import faulthandler
import json
import math
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

LOSSES = {
    "nan": (9.0, 8.0, math.nan, math.nan),
    "frozen": (9.0, 7.0, 7.0, 7.0),
    "falls": (9.0, 8.0, 7.0, 6.0),
}
"""Of the iterations that the log tells of."""


def main() -> None:
    run_json = Path(sys.argv[1])
    run = json.loads(run_json.read_text())
    how = os.environ.get("FAKE_TRAINER", "ok")
    if "=" in how:
        how = dict(pair.split("=") for pair in how.split(",")).get(run["point"]["engine"], "ok")
    rank = os.environ["RANK"]
    os.write(1, f"rank {rank} of {os.environ['WORLD_SIZE']} how {how}\n".encode())  # in one piece
    print(f"omp {os.environ['OMP_NUM_THREADS']} cwd {Path.cwd().name}", file=sys.stderr)
    _end(how, run_json.parent, run, rank)


def _end(how: str, folder: Path, run: dict, rank: str) -> None:
    if how == "fail":
        time.sleep(600 * int(rank))  # two ranks' words at the same time would run into each other
        raise ValueError("the trainer's own words")
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "hang":
        child = subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True
        )
        (folder / f"pids-{rank}").write_text(f"{os.getpid()} {child.pid}")
        time.sleep(600)
    metrics = folder / run["metrics"]
    if how in ("stuck", "stopped"):
        _get_stuck(how, metrics, rank)
    if how in LOSSES and rank == "0":
        print("".join(_lines(LOSSES[how])))
    if how in ("ok", *LOSSES) and rank == "0":
        metrics.write_text(_iterations() + json.dumps({"event": "end", "iterations": 2}) + "\n")
    _exhaust(how, metrics)


def _lines(losses: tuple[float, ...]) -> Iterator[str]:
    """As the trainer prints them."""
    for number, loss in enumerate(losses, start=1):
        yield (
            f" elapsed_time 0.005000 | consumed samples: {4 * number:12d} | elapsed time per "
            f"iteration (ms): 5.0 | learning rate: 3.000E-04 | global batch size:     4 | lm loss: "
            f"{loss:.6E} | number of skipped iterations:   0 | number of nan iterations: "
            f"{int(loss != loss):3d} |\n"
        )


def _iterations() -> str:
    events = [
        {"event": "iteration", "iteration": i, "iteration_ms": 5.0, "loss": 9.0 - i} for i in (1, 2)
    ]
    return "".join(json.dumps(event) + "\n" for event in events)


def _get_stuck(how: str, metrics: Path, rank: str) -> None:
    # As the trainer does.
    faulthandler.register(signal.SIGUSR1, all_threads=True, chain=False)
    if rank == "0":
        metrics.write_text(_iterations())
        if how == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
    _wait_for_ever()


def _wait_for_ever() -> None:
    time.sleep(600)


def _exhaust(how: str, metrics: Path) -> None:
    if how == "host-memory":
        resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))
        bytearray(2**31)
    if how == "allocator":
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried")
    if how == "greedy":
        print(len(b"x" * 2**31))
    if how == "full":
        with metrics.open("wb", buffering=0) as file:
            while True:
                file.write(b" " * 4095 + b"\n")


if __name__ == "__main__":
    main()
