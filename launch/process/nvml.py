"""GPUs as NVIDIA's management library sees them, through nvidia-ml-py where it is installed."""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

BYTES_PER_KB = 1000
"""NVML gives PCIe throughput in KB/s."""
DRIVER = Path("/proc/driver/nvidia/version")
"""There where NVIDIA's driver is loaded."""
MISSING = (
    "GPUs are not sampled: nvidia-ml-py is not installed; "
    "`.venv/bin/python -m pip install -r requirements/gpu.txt` installs it\n"
)


FIELDS = (
    *("device_id", "gpu_util_percent", "gpu_memory_used_bytes"),
    *("pcie_tx_bytes_per_s", "pcie_rx_bytes_per_s"),
)
"""Of a GPU's sample; ``device_id`` is CUDA's number of it."""


class Gpus:
    """Some GPUs of this machine; none where the library, the driver or a GPU is missing."""

    def __init__(self, visible: str | None, count: int) -> None:
        """Choose them.

        Args:
            visible: ``CUDA_VISIBLE_DEVICES`` of who uses them; None for all.
            count: how many of those it sees it uses.
        """
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
        """:data:`FIELDS` of each; null what it does not say.

        PCIe throughput is measured by the driver over 20 ms, in which this waits.
        """
        return [
            dict(zip(FIELDS, (number, *self._stands(handle)), strict=True))
            for number, handle in enumerate(self._handles)
        ]

    def processes(self) -> list[dict[int, int | None] | None]:
        """For each, the processes that compute on it: id to bytes held, None where not recorded.

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

    def _stands(self, handle: Any) -> Iterator[int | None]:  # noqa: ANN401 - NVML's
        """Values of the fields after ``device_id``."""
        nvml = self._nvml
        yield self._ask(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        yield self._ask(lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used)
        for counter in (nvml.NVML_PCIE_UTIL_TX_BYTES, nvml.NVML_PCIE_UTIL_RX_BYTES):
            rate = self._ask(partial(nvml.nvmlDeviceGetPcieThroughput, handle, counter))
            yield None if rate is None else rate * BYTES_PER_KB

    def _handle(self, name: str) -> Any:  # noqa: ANN401
        if name.isdigit():
            return self._nvml.nvmlDeviceGetHandleByIndex(int(name))
        return self._nvml.nvmlDeviceGetHandleByUUID(name)

    def _ask(self, question: Callable[[], Any]) -> Any:  # noqa: ANN401
        if self._nvml is None:
            return None
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
