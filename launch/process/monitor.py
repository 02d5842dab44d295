"""Samples a run from outside its timed processes: host memory, CPU and GPUs, in ``monitor.jsonl``.

A thread of the launcher, which has nothing else to do. It never fails a run: what it cannot find
out is null, and when it cannot write it stops. nvidia-ml-py shows the GPUs, where it is installed.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import os
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import IO, Any

import psutil

from deep_optimizer_states.core.host import free_host_bytes, usable_cores
from deep_optimizer_states.units import GIB
from launch.process.supervise import Members
from launch.process.watch import meanwhile

LOOK_S = 0.5
"""Seconds over which the processors are looked at before a run."""
BUSY_PERCENT = 20.0
"""Share of the usable cores above which others are said to disturb what is timed."""
NO_GPU: dict[str, Any] = dict.fromkeys(
    (
        *("device_id", "gpu_util_percent", "gpu_memory_used_bytes"),
        *("pcie_tx_bytes_per_s", "pcie_rx_bytes_per_s", "gpu_memory_run_bytes"),
    )
)
"""What a sample says of a device; ``device_id`` is CUDA's number of it."""
_BYTES_PER_KB = 1000
"""NVML gives PCIe throughput in KB/s."""


class Gpus:
    """Some GPUs of this machine; none where the library, the driver or a GPU is missing."""

    def __init__(self, visible: str | None, count: int) -> None:
        """Choose the first ``count`` of ``CUDA_VISIBLE_DEVICES``, numbers; None for all."""
        self._nvml: Any = None
        self._handles: list[Any] = []
        if count <= 0:
            return
        try:
            nvml: Any = importlib.import_module("pynvml")
            nvml.nvmlInit()
        except Exception:  # noqa: BLE001 - no library, no driver, or one of another version
            return
        self._nvml = nvml
        numbers = _numbers(visible, self._ask(nvml.nvmlDeviceGetCount) or 0)
        self._handles = [
            self._ask(partial(nvml.nvmlDeviceGetHandleByIndex, number))
            for number in numbers[:count]
        ]

    def sample(self, own: set[int]) -> list[dict[str, Any]]:
        """Return :data:`NO_GPU`'s fields of each; ``own`` are the ids of the run's processes.

        Null is what a GPU does not say. PCIe throughput is measured by the driver over 20 ms, in
        which this waits.
        """
        nvml, rows = self._nvml, []
        for number, (handle, processes) in enumerate(
            zip(self._handles, self.processes(), strict=True)
        ):
            tx, rx = (
                self._ask(partial(nvml.nvmlDeviceGetPcieThroughput, handle, counter))
                for counter in (nvml.NVML_PCIE_UTIL_TX_BYTES, nvml.NVML_PCIE_UTIL_RX_BYTES)
            )
            rates = self._ask(partial(nvml.nvmlDeviceGetUtilizationRates, handle))
            memory = self._ask(partial(nvml.nvmlDeviceGetMemoryInfo, handle))
            # A container may know our processes by other ids: nothing is known then.
            held = [size for pid, size in processes.items() if pid in own and size is not None]
            rows.append(
                {
                    "device_id": number,
                    "gpu_util_percent": None if rates is None else rates.gpu,
                    "gpu_memory_used_bytes": None if memory is None else memory.used,
                    "pcie_tx_bytes_per_s": None if tx is None else tx * _BYTES_PER_KB,
                    "pcie_rx_bytes_per_s": None if rx is None else rx * _BYTES_PER_KB,
                    "gpu_memory_run_bytes": sum(held) if held else None,
                }
            )
        return rows

    def processes(self) -> list[dict[int, int | None]]:
        """Return the processes that compute on each: id to bytes held, None where not recorded."""
        nvml = self._nvml
        found = [
            self._ask(partial(nvml.nvmlDeviceGetComputeRunningProcesses, handle)) or []
            for handle in self._handles
        ]
        return [{process.pid: process.usedGpuMemory for process in each} for each in found]

    def close(self) -> None:
        """Let go of the library."""
        if self._nvml is not None:
            self._ask(self._nvml.nvmlShutdown)
            self._nvml, self._handles = None, []

    def _ask(self, question: Callable[[], Any]) -> Any:
        with contextlib.suppress(self._nvml.NVMLError):
            return question()
        return None


def _numbers(visible: str | None, num_gpus: int) -> list[int]:
    """Return NVML's numbers in CUDA's order, up to the first that is none."""
    if visible is None:
        return list(range(num_gpus))
    words = (word.strip() for word in visible.split(","))
    known = itertools.takewhile(lambda word: word.isdigit() and int(word) < num_gpus, words)
    return [int(word) for word in known]


def look_around(gpus: Gpus) -> dict[str, Any]:
    """Look how busy the machine is before a run is timed: its times may suffer from it.

    Returns:
        ``cpu_percent`` (of the cores that we may use, 0 to 100) and ``busy``: in words what
        disturbs, empty when nothing does.
    """
    each = psutil.cpu_percent(LOOK_S, percpu=True)
    usable = [each[core] for core in os.sched_getaffinity(0) if core < len(each)] or each
    cpu_percent = round(sum(usable) / len(usable), 1)
    words = []
    if cpu_percent > BUSY_PERCENT:
        words.append(f"others used {cpu_percent:.0f}% of its cores")
    for number, processes in enumerate(gpus.processes()):
        for pid, held in processes.items():
            holds = "" if held is None else f", {held / GIB:.1f} GiB"
            words.append(f"process {pid} used GPU {number}{holds}")
    return {"cpu_percent": cpu_percent, "busy": "; ".join(words)}


def monitoring(
    members: Members, path: Path, interval_s: float, gpus: Gpus
) -> AbstractContextManager[None]:
    """Sample a run every ``interval_s`` seconds into ``path`` until the block ends."""
    # A driver that hangs must not hold the launcher.
    follow = partial(_follow, members, path, interval_s, gpus)
    return meanwhile("monitor: sampling", follow, patience_s=30.0)


def _follow(
    members: Members, path: Path, interval_s: float, gpus: Gpus, ended: threading.Event
) -> None:
    started = due = time.monotonic()
    try:
        with path.open("a", encoding="utf-8") as file:
            _read(members)  # psutil counts processor time between two looks
            while True:
                due = max(due + interval_s, time.monotonic())
                if ended.wait(due - time.monotonic()):
                    return
                _sample(members, gpus, started, file)
    finally:
        gpus.close()


def _read(members: Members) -> tuple[set[int], int, float]:
    """Ids and resident bytes of all processes, and percent of one core that they used since."""
    own, used_bytes, cpu_percent = set(), 0, 0.0
    for process in members.sample():
        with contextlib.suppress(psutil.Error), process.oneshot():
            used_bytes += process.memory_info().rss
            cpu_percent += process.cpu_percent()
            own.add(process.pid)
    return own, used_bytes, cpu_percent


def _sample(members: Members, gpus: Gpus, started: float, file: IO[str]) -> None:
    own, used_bytes, cpu_percent = _read(members)
    machine = psutil.virtual_memory()
    host = {
        "time_s": round(time.monotonic() - started, 3),
        "host_used_bytes": used_bytes,
        "machine_used_bytes": machine.total - machine.available,
        "host_free_bytes": free_host_bytes(),
        "cpu_percent": round(min(100.0, cpu_percent / usable_cores()), 2),
    }
    rows = [{**host, **device} for device in gpus.sample(own) or [NO_GPU]]
    file.write("".join(json.dumps(row, allow_nan=False) + "\n" for row in rows))
    file.flush()
