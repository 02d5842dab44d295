"""The most that a run takes: while it loads, trains and saves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deep_optimizer_states.predict.memory.arrays import (
    LOADING,
    SAVING,
    TRAINING,
    Array,
    Moment,
    arrays_of,
)
from deep_optimizer_states.predict.memory.setting import Setting

GIB, MIB = 2**30, 2**20
CUDA_PROCESS_BYTES = 5 * GIB
"""Host memory of a rank with CUDA's libraries and context, before the model."""
CPU_PROCESS_BYTES = 430 * MIB
"""The same on a machine without a GPU: Python, torch, transformers and DeepSpeed."""
ZERO_BYTES = 45 * MIB
"""What ZeRO's optimizers import when they are made."""
STEPPED_BYTES = 16 * MIB
"""Libraries' own memory once an iteration has run."""
EXPERTS_BYTES = 160 * MIB
"""What torch's products of experts leave behind on a CPU."""
CONTEXT_BYTES = 1.5 * GIB
"""CUDA's context and what its allocator cannot use: beside what torch counts as allocated."""
WORKSPACE_BYTES = 0.6 * GIB
"""Of the GPU's libraries."""


@dataclass(frozen=True)
class Peak:
    """The most at one time, of one rank.

    Attributes:
        device_bytes: On its GPU, context and workspaces included; 0 without one.
        host_bytes: Of its process.
        when: The moment at which device and host together hold the most.
        arrays: What is there then.
    """

    device_bytes: float
    host_bytes: float
    when: Moment
    arrays: tuple[Array, ...]


@dataclass(frozen=True)
class Peaks:
    """The most of one rank while it loads, trains and saves a checkpoint."""

    load: Peak
    train: Peak
    save: Peak

    @property
    def device_bytes(self) -> float:
        """Return the most of all."""
        return max(peak.device_bytes for peak in (self.load, self.train, self.save))

    @property
    def host_bytes(self) -> float:
        """Return the most of all."""
        return max(peak.host_bytes for peak in (self.load, self.train, self.save))


def peaks_of(setting: Setting, has_gpu: bool) -> Peaks:
    """Predict the memory of one rank.

    Args:
        setting: What runs.
        has_gpu: Whether it has a GPU; else the host holds everything.
    """
    arrays = arrays_of(setting, has_gpu)
    loaded = ZERO_BYTES if setting.stage else 0.0
    stepped = loaded + STEPPED_BYTES
    if setting.architecture.has_experts and not has_gpu:
        stepped += EXPERTS_BYTES
    return Peaks(
        load=_most(arrays, LOADING, has_gpu, loaded),
        train=_most(arrays, TRAINING, has_gpu, stepped),
        save=_most(arrays, SAVING, has_gpu, stepped),
    )


def bytes_at(arrays: Sequence[Array], moment: Moment, on_host: bool) -> float:
    """Return the sum of the arrays that are on the host, or else the device, at a moment."""
    return sum(a.num_bytes for a in arrays if moment in a.when and a.on_host is on_host)


def _most(arrays: list[Array], when: frozenset[Moment], has_gpu: bool, libraries: float) -> Peak:
    """Return the largest sums of arrays that are there at once, with the process's own memory."""
    moments = sorted(when)
    device = {moment: bytes_at(arrays, moment, on_host=False) for moment in moments}
    host = {moment: bytes_at(arrays, moment, on_host=True) for moment in moments}
    most = max(moments, key=lambda moment: device[moment] + host[moment])
    there = tuple(array for array in arrays if most in array.when)
    if not has_gpu:
        return Peak(0.0, device[most] + host[most] + CPU_PROCESS_BYTES + libraries, most, there)
    return Peak(
        max(device.values()) + CONTEXT_BYTES + WORKSPACE_BYTES,
        max(host.values()) + CUDA_PROCESS_BYTES + libraries,
        most,
        there,
    )
