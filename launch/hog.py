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
import re
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from configs.cli import Parser, complain, run_command
from configs.files import write_json
from deep_optimizer_states.core.host import usable_cores

SLICE_S = 0.010
"""Seconds of work between two looks at the clock."""
REPORT_S = 2.0
"""Seconds between two reports."""
MOST_DEBT_S = 1.0
"""Work left undone while others were stronger that is still caught up; more is forgotten."""
MOST_WORKERS_A_CORE = 8


class Debt:
    """How much work is due so that a share is held."""

    def __init__(self, share: float, now: float) -> None:
        self._share = share
        self._at = now
        self._seconds = 0.0

    def due_s(self, now: float) -> float:
        """Return the seconds of work due at ``now``; below 0 when too much was done."""
        passed_s, self._at = now - self._at, now
        self._seconds = min(self._seconds + self._share * passed_s, MOST_DEBT_S)
        return self._seconds

    def pay(self, seconds: float) -> None:
        """Count work that was done."""
        self._seconds -= seconds

    def rest_s(self) -> float:
        """Return the seconds to sleep until work is due again, at most a slice."""
        return min(max(-self._seconds / self._share, 0.0), SLICE_S)


class CpuHolder:
    """Holds a share of all cores by several processes a core, which others cannot outvote."""

    def __init__(self, share: float) -> None:
        self._cores = usable_cores()
        a_core = min(MOST_WORKERS_A_CORE, 1 + math.ceil(2 * share / (1 - share)))
        context, words = multiprocessing.get_context("fork"), (share / a_core, os.getpid())
        self._workers = [
            context.Process(target=_spin, args=words, daemon=True)
            for _ in range(self._cores * a_core)
        ]
        for worker in self._workers:
            worker.start()
        self._seen = [psutil.Process(worker.pid) for worker in self._workers]

    def step(self) -> None:
        """Sleep; the workers work."""
        if not all(worker.is_alive() for worker in self._workers):
            raise RuntimeError("one of its workers ended")
        time.sleep(5 * SLICE_S)

    def held_s(self) -> float:
        """Return the processor seconds of all workers, over the cores."""
        return sum(sum(process.cpu_times()[:2]) for process in self._seen) / self._cores

    def close(self) -> None:
        """End the workers."""
        for worker in self._workers:
            worker.kill()


def _spin(share: float, parent: int) -> None:
    """Use ``share`` of one core until the parent is gone."""
    # The whole run is told to end; the parent reads the sums before it ends us.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # Linux shares the processor between sessions first: in one, all workers count as one process.
    os.setsid()
    debt, last = Debt(share, time.monotonic()), time.process_time()
    while os.getppid() == parent:
        now = time.process_time()
        debt.pay(now - last)
        last = now
        if (due_s := debt.due_s(time.monotonic())) > 0:
            until = now + min(due_s, SLICE_S)
            while time.process_time() < until:
                pass
        else:
            time.sleep(max(debt.rest_s(), 0.001))


class GpuHolder:
    """Holds a share of a GPU by matrix products in slices of about 10 ms."""

    SIDE = 4096
    """Rows and columns of each matrix: large enough to fill every multiprocessor."""

    def __init__(self, share: float, device: str) -> None:
        import torch

        self._cuda: Any = torch.cuda
        self._device = torch.device(device)
        torch.cuda.set_device(self._device)
        shape = (self.SIDE, self.SIDE)
        self._left = torch.ones(shape, device=self._device, dtype=torch.bfloat16)
        self._out = torch.empty_like(self._left)
        self._matmul: Any = torch.matmul
        self._slices = 0
        self._products = 1
        self._time_slice_s()  # loads the kernel
        self._products = max(1, round(SLICE_S / self._median_slice_s()))
        self._slice_s = self._median_slice_s()
        self._debt = Debt(share, time.monotonic())

    def step(self) -> None:
        """Do a slice when one is due, sleep otherwise."""
        if self._debt.due_s(time.monotonic()) <= 0:
            time.sleep(self._debt.rest_s())
            return
        self._time_slice_s()
        self._debt.pay(self._slice_s)
        self._slices += 1

    def held_s(self) -> float:
        """Return the time of the slices done, at their duration on a free device."""
        return self._slices * self._slice_s

    def close(self) -> None:
        """Nothing to end."""

    def _median_slice_s(self) -> float:
        return sorted(self._time_slice_s() for _ in range(9))[4]

    def _time_slice_s(self) -> float:
        # Blocking events: waiting for the device must not cost a core as well.
        begin, end = (self._cuda.Event(enable_timing=True, blocking=True) for _ in range(2))
        begin.record()
        for _ in range(self._products):
            self._matmul(self._left, self._left, out=self._out)
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000.0


def main(argv: Sequence[str] | None = None) -> int:
    """Hold a share from the command line.

    Returns:
        0 after SIGTERM, or when the process that started us has gone.
    """
    parser = Parser("python -m launch.hog", __doc__ or "")
    parser.add_argument("--share", type=_share, required=True, help="above 0, below 1")
    parser.add_argument("--device", type=_device, required=True, help="cpu or cuda:N")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="hog.json")
    given = parser.read(argv)
    asked: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, _frame: asked.append(number))
    parent = os.getppid()
    try:
        on_cpu = given.device == "cpu"
        holder = CpuHolder(given.share) if on_cpu else GpuHolder(given.share, given.device)
    except (ImportError, RuntimeError, AssertionError) as error:  # no torch, no CUDA, no memory
        return _failed(given.device, error)
    try:
        started = reported = time.monotonic()
        _report(given, 0.0, None)
        # A hog that outlives its run would hold the device for ever.
        while not asked and os.getppid() == parent:
            holder.step()
            now = time.monotonic()
            if now - reported >= REPORT_S:
                _report(given, now - started, holder.held_s())
                reported = now
        _report(given, time.monotonic() - started, holder.held_s())
    except (RuntimeError, psutil.Error) as error:
        return _failed(given.device, error)
    finally:
        holder.close()
    return 0


def _failed(device: str, error: Exception) -> int:
    first_line, *_ = str(error).splitlines() or [type(error).__name__]
    complain(f"[launch] hog of {device}: error: {first_line}")
    return 1


def _report(given: argparse.Namespace, seconds: float, held_s: float | None) -> None:
    table = {
        "device": given.device,
        "share_asked": given.share,
        "share_held": None if held_s is None else held_s / seconds,
        "seconds": seconds,
    }
    try:
        write_json(given.out, table)
    except OSError as error:  # the disk is full: the share is still held
        why = f"{given.out.name} could not be written: {error.strerror}"
        complain(f"[launch] hog of {given.device}: {why}")


def _share(text: str) -> float:
    value = float(text)
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give a share above 0 and below 1")
    return value


def _device(text: str) -> str:
    if not re.fullmatch(r"cpu|cuda:\d+", text):
        raise argparse.ArgumentTypeError(f"{text!r}: give cpu or cuda:N")
    return text


if __name__ == "__main__":
    raise SystemExit(run_command(main))
