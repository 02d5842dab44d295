"""The emulated device with a memory that somebody counts, so that it can run out."""

import threading
import weakref

import numpy as np
import torch

from deep_optimizer_states.core.device.emulated import EmulatedDevice
from deep_optimizer_states.core.host import DEVICE_MARGIN


class Memory:
    """A count of device memory, with a limit; all in bytes."""

    def __init__(self, total_bytes):
        self.total_bytes = total_bytes
        self.used_bytes = self.others_bytes = self.peak_bytes = 0
        self._lock = threading.RLock()  # a finaliser may run in the middle of another

    def take_others(self, num_bytes):
        """Count memory as taken by others than the device's owner, or below 0 as given back."""
        self._count("others_bytes", num_bytes)

    def take(self, num_bytes):
        """Return memory that counts as taken while anything looks at it."""
        self._count("used_bytes", num_bytes)
        raw = np.empty(num_bytes, dtype=np.uint8)
        weakref.finalize(raw, self._count, "used_bytes", -num_bytes).atexit = False
        return torch.from_numpy(raw)

    @property
    def free_bytes(self):
        return self.total_bytes - self.used_bytes - self.others_bytes

    def _count(self, whose, num_bytes):
        with self._lock:
            if num_bytes > max(0, self.free_bytes):
                raise torch.OutOfMemoryError(
                    f"emulated device out of memory: {num_bytes} bytes, {self.free_bytes} are free"
                )
            setattr(self, whose, getattr(self, whose) + num_bytes)
            self.peak_bytes = max(self.peak_bytes, self.used_bytes + self.others_bytes)


class LimitedDevice(EmulatedDevice):
    """Takes its memory of ``memory``."""

    tells_memory = True

    def __init__(self, adam, faults=None, memory=None):
        super().__init__(adam, faults)
        self._memory = memory

    def empty_device(self, numel, dtype):
        if not numel:
            return super().empty_device(numel, dtype)
        return self._memory.take(numel * dtype.itemsize).view(dtype).fill_(torch.nan)

    def free_bytes(self):
        return int(self._memory.free_bytes - DEVICE_MARGIN * self._memory.total_bytes)

    def peak_bytes(self):
        return self._memory.total_bytes - self._memory.free_bytes, self._memory.peak_bytes
