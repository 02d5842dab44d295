"""Hold a share of a device's time: ``python -m launch.hog --share 0.4 --device cuda:0 --out FILE``.

The paper's question behind it: what is left of a gain when others use the device too. FILE is made
when the share begins to be held, renewed every few seconds, and has its last form after SIGTERM.

A GPU's share is counted in slices of matrix products whose duration was measured while nobody else
used the device, so that a slice counts the same when another process is given half of it. A CPU's
share is processor time out of all usable cores.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from configs.cli import Parser, complain, run_command
from configs.files import write_json
from deep_optimizer_states.core.host import usable_cores

SLICE_S = 0.010
"""Seconds of work between two pauses."""
REPORT_S = 2.0
"""Seconds between two reports."""
MOST_WORKERS_A_CORE = 8
MATRIX_SIDE = 4096
"""Rows and columns of each matrix: large enough to fill every multiprocessor of a GPU."""


def hold_cpu(share: float) -> Iterator[float]:
    """Hold a share of all cores while it is iterated; yield the seconds that were held.

    Several processes a core work, so that other programs cannot outvote them.
    """
    cores, a_core = usable_cores(), min(MOST_WORKERS_A_CORE, 1 + math.ceil(2 * share / (1 - share)))
    context, words = multiprocessing.get_context("fork"), (share / a_core, os.getpid())
    workers = [
        context.Process(target=_spin, args=words, daemon=True) for _ in range(cores * a_core)
    ]
    try:
        for worker in workers:
            worker.start()
        seen = [psutil.Process(worker.pid) for worker in workers]
        # No deadline: it holds the processor until it is ended.
        while all(worker.is_alive() for worker in workers):
            yield sum(sum(process.cpu_times()[:2]) for process in seen) / cores
            time.sleep(5 * SLICE_S)
        raise RuntimeError("one of its workers ended")
    finally:
        for worker in workers:
            if worker.pid is not None:
                worker.kill()


def _spin(share: float, parent: int) -> None:
    """Use ``share`` of one core until the parent is gone."""
    # The whole run is told to end; the parent reads the sums before it ends us.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # Linux shares the processor between sessions first: in one, all workers count as one process.
    os.setsid()
    next_s = time.monotonic()
    while os.getppid() == parent:
        until_s = time.process_time() + SLICE_S
        while time.process_time() < until_s:
            pass
        next_s = _pause(next_s, SLICE_S / share)


def _pause(began_s: float, period_s: float) -> float:
    """Sleep until a slice's period is over, and return when the next one begins.

    A slice that took longer than its period, because others used the device too, is not made up
    for.
    """
    next_s, now_s = began_s + period_s, time.monotonic()
    if now_s < next_s:
        time.sleep(next_s - now_s)
    return max(next_s, now_s)


def hold_gpu(share: float, device: str) -> Iterator[float]:
    """Hold a share of a GPU, in slices of about 10 ms, while it is iterated; yield as above.

    Seconds are those of the slices at their duration on a free device.
    """
    import torch

    cuda: Any = torch.cuda
    cuda.set_device(torch.device(device))
    shape = (MATRIX_SIDE, MATRIX_SIDE)
    left = torch.ones(shape, device=device, dtype=torch.bfloat16)
    out = torch.empty_like(left)

    def products_s(number: int) -> float:
        # Blocking events: waiting for the device must not cost a core as well.
        begin, end = (cuda.Event(enable_timing=True, blocking=True) for _ in range(2))
        begin.record()
        for _ in range(number):
            torch.matmul(left, left, out=out)
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000.0

    def median_s(number: int) -> float:
        return sorted(products_s(number) for _ in range(9))[4]

    products_s(1)  # loads the kernel
    a_slice = max(1, round(SLICE_S / median_s(1)))
    slice_s, held_s, next_s = median_s(a_slice), 0.0, time.monotonic()
    while True:
        yield held_s
        products_s(a_slice)
        held_s += slice_s
        next_s = _pause(next_s, slice_s / share)


def main(argv: Sequence[str] | None = None) -> int:
    """Hold a share from the command line.

    Returns:
        0 after SIGTERM, or when the process that started us has gone.
    """
    parser = Parser("python -m launch.hog", __doc__ or "")
    parser.add_argument("--share", type=float, required=True, help="above 0, below 1")
    parser.add_argument("--device", required=True, help="cpu or cuda:N")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="hog.json")
    given = parser.read(argv)
    asked: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, _frame: asked.append(number))
    parent, started, reported = os.getppid(), 0.0, 0.0
    on_cpu = given.device == "cpu"
    try:
        for held_s in hold_cpu(given.share) if on_cpu else hold_gpu(given.share, given.device):
            now = time.monotonic()
            started = started or now
            # A hog that outlives its run would hold the device for ever.
            is_last = bool(asked) or os.getppid() != parent
            if is_last or now - reported >= REPORT_S:
                _report(given, now - started, held_s)
                reported = now
            if is_last:
                break
    except (ImportError, RuntimeError, AssertionError, psutil.Error) as error:
        first_line, *_ = str(error).splitlines() or [type(error).__name__]
        complain(f"[launch] hog of {given.device}: error: {first_line}")
        return 1
    return 0


def _report(given: argparse.Namespace, seconds: float, held_s: float) -> None:
    table = {
        "device": given.device,
        "share_asked": given.share,
        "share_held": held_s / seconds if seconds else None,
        "seconds": seconds,
    }
    try:
        write_json(given.out, table)
    except OSError as error:  # the disk is full: the share is still held
        why = f"{given.out.name} could not be written: {error.strerror}"
        complain(f"[launch] hog of {given.device}: {why}")


if __name__ == "__main__":
    raise SystemExit(run_command(main))
