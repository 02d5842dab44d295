"""Samples a run from outside its timed processes: host memory, CPU and GPUs, in ``monitor.jsonl``.

A thread of the launcher, which has nothing else to do. It never fails a run: what it cannot find
out is null, and when it cannot write it stops.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Protocol, Self

import psutil

from deep_optimizer_states.cores import usable_cores
from deep_optimizer_states.memory import free_host_bytes
from launch.process.members import Members

NO_GPU: dict[str, Any] = {
    "device_id": None,
    "gpu_util_percent": None,
    "gpu_memory_used_bytes": None,
    "pcie_tx_bytes_per_s": None,
    "pcie_rx_bytes_per_s": None,
}


class Devices(Protocol):
    """Whatever can say how its devices stand."""

    def sample(self) -> list[dict[str, Any]]:
        """The fields of :data:`NO_GPU` for each device; may take a while, must not raise."""

    def close(self) -> None:
        """Let go of them."""


class Monitor:
    """Samples while the block lasts."""

    def __init__(
        self,
        members: Members,
        path: Path,
        interval_s: float,
        devices: Devices,
    ) -> None:
        """Say what to sample.

        Args:
            members: the run's processes; nobody else may ask for samples of them.
            path: ``monitor.jsonl``; empty until the first interval is over.
            interval_s: seconds between two samples.
            devices: the GPUs of the run's ranks.
        """
        self._members = members
        self._path = path
        self._interval_s = interval_s
        self._devices = devices
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="monitor", daemon=True)
        self._started = time.monotonic()
        self._cpu = CpuClock(usable_cores())

    def __enter__(self) -> Self:
        self._started = time.monotonic()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._thread.join(timeout=30.0)  # a driver that hangs must not hold the launcher

    def _follow(self) -> None:
        try:
            with self._path.open("a", encoding="utf-8") as file:
                self._cpu.percent(self._started, self._read()[1])
                due = self._started
                while True:
                    due = max(due + self._interval_s, time.monotonic())
                    if self._ended.wait(due - time.monotonic()):
                        return
                    self._sample(file)
        except Exception as error:  # noqa: BLE001 - no fault of ours may end a run
            sys.stderr.write(f"monitor: sampling ended: {error!r}\n")
        finally:
            self._devices.close()

    def _read(self) -> tuple[int, dict[int, float]]:
        """Resident bytes of all processes, and processor seconds of each."""
        used_bytes, cpu_seconds = 0, {}
        for process in self._members.sample():
            try:
                with process.oneshot():
                    used_bytes += process.memory_info().rss
                    times = process.cpu_times()
            except psutil.Error:
                continue
            cpu_seconds[process.pid] = times.user + times.system
        return used_bytes, cpu_seconds

    def _sample(self, file: IO[str]) -> None:
        used_bytes, cpu_seconds = self._read()
        now = time.monotonic()
        host = {
            "time_s": round(now - self._started, 3),
            "host_used_bytes": used_bytes,
            "host_free_bytes": free_host_bytes(),
            "cpu_percent": self._cpu.percent(now, cpu_seconds),
        }
        rows = [{**host, **device} for device in self._devices.sample() or [NO_GPU]]
        file.write("".join(json.dumps(row, allow_nan=False) + "\n" for row in rows))
        file.flush()


class CpuClock:
    """Turns processor seconds of processes into a share of the usable cores."""

    def __init__(self, cores: int) -> None:
        self._cores = cores
        self._seconds: dict[int, float] = {}
        self._at: float | None = None

    def percent(self, now: float, seconds: Mapping[int, float]) -> float | None:
        """Share since the last call, 0 to 100; None for the first, which has nothing before it.

        Args:
            now: time of the sample, in s.
            seconds: processor time of each living process since its start, by process id. What a
                process used between the last sample and its end is lost.
        """
        before, at = self._seconds, self._at
        self._seconds, self._at = dict(seconds), now
        if at is None or now <= at:
            return None
        # A process that is new, or whose id was reused, has used all of its time since then.
        used = sum(
            total - before[pid] if total >= before.get(pid, float("inf")) else total
            for pid, total in seconds.items()
        )
        return round(min(100.0, 100.0 * used / ((now - at) * self._cores)), 2)
