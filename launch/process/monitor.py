"""Samples a run from outside its timed processes: host memory, CPU and GPUs, in ``monitor.jsonl``.

A thread of the launcher, which has nothing else to do. It never fails a run: what it cannot find
out is null, and when it cannot write it stops.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import IO, Any, Self

import psutil

from deep_optimizer_states.cores import usable_cores
from deep_optimizer_states.memory import free_host_bytes
from launch.process.members import Members
from launch.process.nvml import FIELDS, Gpus

NO_GPU: dict[str, Any] = dict.fromkeys((*FIELDS, "gpu_memory_run_bytes"))
"""What a sample says of a device; the run's share of its memory comes last."""
PSS_SHARE = 0.01
"""Share of the time that counting shared pages may take: the kernel walks all pages of a process
for it, which can make its own requests for memory wait."""


class Monitor:
    """Samples while the block lasts."""

    def __init__(
        self,
        members: Members,
        path: Path,
        interval_s: float,
        devices: Gpus,
    ) -> None:
        """Say what to sample.

        Args:
            members: the run's processes; nobody else may ask for samples of them.
            path: ``monitor.jsonl``; empty until the first interval is over.
            interval_s: seconds between two samples.
            devices: the GPUs of the run's ranks; its ``sample`` may take a while.
        """
        self._members = members
        self._path = path
        self._interval_s = interval_s
        self._devices = devices
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="monitor", daemon=True)
        self._started = time.monotonic()
        self._pss_due = 0.0

    def __enter__(self) -> Self:
        self._started = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._ended.set()
        self._thread.join(timeout=30.0)  # a driver that hangs must not hold the launcher

    def _follow(self) -> None:
        try:
            with self._path.open("a", encoding="utf-8") as file:
                self._read()  # psutil counts processor time between two looks
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

    def _read(self) -> tuple[int, float]:
        """Resident bytes of all processes, and percent of one core that they used since."""
        used_bytes, cpu_percent = 0, 0.0
        for process in self._members.sample():
            with contextlib.suppress(psutil.Error), process.oneshot():
                used_bytes += process.memory_info().rss
                cpu_percent += process.cpu_percent()
        return used_bytes, cpu_percent

    def _pss_bytes(self) -> int | None:
        """Proportional bytes of all processes, pages that they share counted once.

        None when that is not known, or when it was looked at so shortly ago that another look would
        cost more than :data:`PSS_SHARE` of the time.
        """
        if time.monotonic() < self._pss_due:
            return None
        # Processor time: while others have the core, nobody walks pages.
        begin_s = time.thread_time()
        total_bytes = 0
        for process in self._members.sample():
            with contextlib.suppress(psutil.NoSuchProcess):
                try:
                    total_bytes += process.memory_full_info().pss
                except psutil.AccessDenied:
                    self._pss_due = float("inf")
                    return None
        self._pss_due = time.monotonic() + (time.thread_time() - begin_s) / PSS_SHARE
        return total_bytes

    def _sample(self, file: IO[str]) -> None:
        used_bytes, cpu_percent = self._read()
        machine = psutil.virtual_memory()
        host = {
            "time_s": round(time.monotonic() - self._started, 3),
            "host_used_bytes": used_bytes,
            "host_pss_bytes": self._pss_bytes(),
            "machine_used_bytes": machine.total - machine.available,
            "host_free_bytes": free_host_bytes(),
            "cpu_percent": round(min(100.0, cpu_percent / usable_cores()), 2),
        }
        own = {process.pid for process in self._members.sample()}
        on_devices = zip(self._devices.sample(), self._devices.processes(), strict=True)
        devices = [
            {**device, "gpu_memory_run_bytes": run_bytes(processes, own)}
            for device, processes in on_devices
        ]
        rows = [{**host, **device} for device in devices or [NO_GPU]]
        file.write("".join(json.dumps(row, allow_nan=False) + "\n" for row in rows))
        file.flush()


def run_bytes(processes: Mapping[int, int | None] | None, own: Collection[int]) -> int | None:
    """Bytes of a GPU that a run's own processes hold.

    Args:
        processes: those that compute on it, see :meth:`Gpus.processes`.
        own: ids of the run's processes.

    Returns:
        None where the driver does not say, or may mean our own by ids that this container lacks.
    """
    if processes is None:
        return None
    held = [size_bytes for pid, size_bytes in processes.items() if pid in own]
    if not held and not all(map(psutil.pid_exists, processes)):
        return None
    known = [size_bytes for size_bytes in held if size_bytes is not None]
    return sum(known) if len(known) == len(held) else None
