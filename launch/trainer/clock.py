"""Measures an iteration: wall time of its phases, and the device's peak memory."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import torch

PHASES = ("forward", "backward", "update")


class PhaseClock:
    """Sums the wall time of each phase over an iteration's micro-batches.

    Forward is without reading the samples, backward with the gradients' reduction and their way to
    the host, update the optimizer's step.
    """

    def __init__(self, device: torch.device, phases: tuple[str, ...] = PHASES) -> None:
        self._on_cuda = device.type == "cuda"
        self._phases = phases
        self._ms = dict.fromkeys(phases, 0.0)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the body; on CUDA, until the device has finished what the body launched."""
        self._synchronize()
        begin = time.perf_counter()
        yield
        self._synchronize()
        self._ms[name] += (time.perf_counter() - begin) * 1000.0

    def take(self) -> dict[str, float]:
        """``forward_ms`` and so on since the last call; starts again at zero."""
        taken, self._ms = self._ms, dict.fromkeys(self._phases, 0.0)
        return {f"{name}_ms": milliseconds for name, milliseconds in taken.items()}

    def _synchronize(self) -> None:
        if self._on_cuda:
            torch.cuda.synchronize()


class PeakMemory:
    """Most device memory allocated at once.

    DeepSpeed's ``memory_breakdown`` resets the allocator's peak several times an iteration; the
    peak is read before every such reset.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._peak_bytes = 0
        if not self._on_cuda:
            return
        from deepspeed.accelerator import get_accelerator

        accelerator = get_accelerator()
        reset = accelerator.reset_peak_memory_stats

        def note_and_reset(device_index: int | None = None) -> None:
            self._note()
            reset(device_index)

        accelerator.reset_peak_memory_stats = note_and_reset

    def take(self) -> int | None:
        """Bytes since the last call; None without CUDA."""
        if not self._on_cuda:
            return None
        self._note()
        peak, self._peak_bytes = self._peak_bytes, 0
        torch.cuda.reset_peak_memory_stats()
        return peak

    def _note(self) -> None:
        self._peak_bytes = max(self._peak_bytes, torch.cuda.max_memory_allocated())


def reserved_peak_gib() -> float | None:
    """Most address space that this process has reserved, in GiB; None where Linux does not say.

    A buffer counts in full as soon as it is allocated, while resident memory counts the pages that
    were written: on a CPU only this shows buckets that a small model does not fill.
    """
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
    except OSError:
        return None
    found = [line.split()[1] for line in status.splitlines() if line.startswith("VmPeak:")]
    return int(found[0]) / 2**20 if found else None
