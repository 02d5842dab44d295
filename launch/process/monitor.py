"""Samples a run from outside its timed processes: host memory, CPU and GPUs, in ``monitor.jsonl``.

A thread of the launcher, which has nothing else to do. It never fails a run: what it cannot find
out is null, and when it cannot write it stops. nvidia-ml-py shows the GPUs, where it is installed.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import IO, Any, Self

import psutil

from deep_optimizer_states.core.host import free_host_bytes, usable_cores
from launch.process.members import Members

LOOK_S = 0.5
"""Seconds over which the processors are looked at before a run."""
BUSY_PERCENT = 20.0
"""Share of the usable cores above which others are said to disturb what is timed."""
PSS_SHARE = 0.01
"""Share of the time that counting shared pages may take: the kernel walks all pages of a process
for it, which can make its own requests for memory wait."""
DRIVER = Path("/proc/driver/nvidia/version")
"""There where NVIDIA's driver is loaded."""
MISSING = (
    "GPUs are not sampled: nvidia-ml-py is not installed; "
    "`.venv/bin/python -m pip install -r requirements/gpu.txt` installs it\n"
)
NO_GPU: dict[str, Any] = dict.fromkeys(
    (
        *("device_id", "gpu_util_percent", "gpu_memory_used_bytes"),
        *("pcie_tx_bytes_per_s", "pcie_rx_bytes_per_s", "gpu_memory_run_bytes"),
    )
)
"""What a sample says of a device; ``device_id`` is CUDA's number of it."""
_BYTES_PER_KB = 1000
"""NVML gives PCIe throughput in KB/s."""
_GIB = 2**30


class Gpus:
    """Some GPUs of this machine; none where the library, the driver or a GPU is missing."""

    def __init__(self, visible: str | None, count: int) -> None:
        """Choose the first ``count`` of ``CUDA_VISIBLE_DEVICES``, which is None for all."""
        self._nvml: Any = None
        self._handles: list[Any] = []
        if count <= 0:
            return
        try:
            nvml: Any = importlib.import_module("pynvml")
        except ImportError:
            _say_missing()
            return
        try:
            nvml.nvmlInit()
        except Exception:  # noqa: BLE001 - no driver, or one of another version
            return
        self._nvml = nvml
        names = _names(visible, self._ask(nvml.nvmlDeviceGetCount) or 0)
        self._handles = [self._ask(partial(self._handle, name)) for name in names[:count]]

    def sample(self) -> list[dict[str, Any]]:
        """Return :data:`NO_GPU`'s fields of each but the run's memory; null what it does not say.

        PCIe throughput is measured by the driver over 20 ms, in which this waits.
        """
        return [self._row(number, handle) for number, handle in enumerate(self._handles)]

    def processes(self) -> list[dict[int, int | None] | None]:
        """Return the processes that compute on each: id to bytes held, None where not recorded.

        A GPU that does not say which they are has None.
        """
        ask = getattr(self._nvml, "nvmlDeviceGetComputeRunningProcesses", None)
        found = [None if ask is None else self._ask(partial(ask, h)) for h in self._handles]
        return [
            None if each is None else {process.pid: process.usedGpuMemory for process in each}
            for each in found
        ]

    def close(self) -> None:
        """Let go of the library."""
        if self._nvml is not None:
            self._ask(self._nvml.nvmlShutdown)
            self._nvml, self._handles = None, []

    def _row(self, number: int, handle: Any) -> dict[str, Any]:  # noqa: ANN401 - NVML's
        nvml = self._nvml
        tx, rx = (
            self._ask(partial(nvml.nvmlDeviceGetPcieThroughput, handle, counter))
            for counter in (nvml.NVML_PCIE_UTIL_TX_BYTES, nvml.NVML_PCIE_UTIL_RX_BYTES)
        )
        return {
            "device_id": number,
            "gpu_util_percent": self._ask(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu),
            "gpu_memory_used_bytes": self._ask(lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used),
            "pcie_tx_bytes_per_s": None if tx is None else tx * _BYTES_PER_KB,
            "pcie_rx_bytes_per_s": None if rx is None else rx * _BYTES_PER_KB,
        }

    def _handle(self, name: str) -> Any:  # noqa: ANN401
        if name.isdigit():
            return self._nvml.nvmlDeviceGetHandleByIndex(int(name))
        return self._nvml.nvmlDeviceGetHandleByUUID(name)

    def _ask(self, question: Callable[[], Any]) -> Any:  # noqa: ANN401
        with contextlib.suppress(self._nvml.NVMLError):
            return question()
        return None


@functools.cache
def _say_missing() -> None:
    """Name the package once where it would be of use; without a GPU nothing is missing."""
    if DRIVER.exists():
        sys.stderr.write(MISSING)


def _names(visible: str | None, num_gpus: int) -> list[str]:
    """Numbers or UUIDs, in CUDA's order; it stops at the first that is not there."""
    if visible is None:
        return [str(number) for number in range(num_gpus)]
    names = []
    for name in (part.strip() for part in visible.split(",")):
        known = name.startswith(("GPU-", "MIG-")) or (name.isdigit() and int(name) < num_gpus)
        if not known:
            break
        names.append(name)
    return names


def look_around(gpus: Gpus) -> dict[str, Any]:
    """Look how busy the machine is before a run is timed: its times may suffer from it.

    Returns:
        ``cpu_percent`` (of the cores that we may use, 0 to 100), ``load_1min``, ``gpu_processes``
        (``device_id``, ``pid``, ``memory_bytes`` or null) and ``busy``: in words what disturbs,
        empty when nothing does.
    """
    each = psutil.cpu_percent(LOOK_S, percpu=True)
    usable = [each[core] for core in os.sched_getaffinity(0) if core < len(each)] or each
    cpu_percent = round(sum(usable) / len(usable), 1)
    gpu_processes = [
        {"device_id": number, "pid": pid, "memory_bytes": memory_bytes}
        for number, processes in enumerate(gpus.processes())
        for pid, memory_bytes in (processes or {}).items()
    ]
    words = []
    if cpu_percent > BUSY_PERCENT:
        words.append(f"others used {cpu_percent:.0f}% of its cores")
    for process in gpu_processes:
        held = process["memory_bytes"]
        holds = "" if held is None else f", {held / _GIB:.1f} GiB"
        words.append(f"process {process['pid']} used GPU {process['device_id']}{holds}")
    return {
        "cpu_percent": cpu_percent,
        "load_1min": round(os.getloadavg()[0], 2),
        "gpu_processes": gpu_processes,
        "busy": "; ".join(words),
    }


class Monitor:
    """Samples while the block lasts."""

    def __init__(self, members: Members, path: Path, interval_s: float, devices: Gpus) -> None:
        """Say what to sample; nobody else may ask ``members`` for samples."""
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
    """Return the bytes of a GPU that a run's own processes hold, of those that compute on it.

    None where the driver does not say, or may mean our own by ids that this container lacks.
    """
    if processes is None:
        return None
    held = [size_bytes for pid, size_bytes in processes.items() if pid in own]
    if not held and not all(map(psutil.pid_exists, processes)):
        return None
    known = [size_bytes for size_bytes in held if size_bytes is not None]
    return sum(known) if len(known) == len(held) else None
