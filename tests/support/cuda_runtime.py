"""A stand-in for the CUDA runtime under ``torch.cuda``, for tests on a machine without a GPU.

What of CUDA it repeats (see ``cuda_memory`` for device tensors):

- A stream is a queue that is worked off in order, on the host's thread: at once, or as late as the
  waits allow where it is named late (see ``late``). Streams are ordered by events alone: torch's
  side streams do not wait for the default stream. Every thread has its current device, and a
  current stream for each device.
- An event is reached when its stream gets to where it was last recorded; a wait means the recording
  at the time of the call; one that was never recorded counts as reached. Times are fp32 ms.
- Page-locked memory is kept in a book: a page cannot be locked twice. A refused call leaves its
  error with the thread, and the thread's next kernel raises it.
- A kernel that fails while it runs breaks the device: every later call raises its error.

Not repeated: speed, limits of queues, graphs, peers, priorities, the pool of 32 streams that torch
hands out, implicit synchronisation by calls that are not listed here, a device's own rounding.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import enum
import mmap
import threading
import time
from types import SimpleNamespace

import numpy as np
import torch


class Point:
    """A place in a stream's queue."""

    has_passed, time_s = False, None

    def arrive(self, time_s):
        self.has_passed, self.time_s = True, time_s


class Stream:
    """One queue of a device, worked off when a ``late.World`` lets it."""

    name = ""

    def __init__(self, runtime, device):
        self.device, self._runtime = device, runtime
        self._items = collections.deque()
        runtime.world.add(self)

    def put(self, work):
        """Queue work that waits for nothing but what is queued before it."""
        self._queue_up(None, work)

    def wait_for(self, point):
        """Queue a wait."""
        self._queue_up(point, lambda: None)

    def _queue_up(self, after, work):
        self._items.append((after, work))
        self._runtime.world.hasten()

    def can_go(self):
        return bool(self._items) and (self._items[0][0] is None or self._items[0][0].has_passed)

    def go(self):
        _, work = self._items.popleft()
        if self._runtime.failure is not None:
            return
        try:
            work()
        except Exception as error:  # noqa: BLE001 - every later call raises it
            self._runtime.failure = error

    def mark(self):
        """A point after all that is queued."""
        point = Point()
        self.put(lambda: point.arrive(self._runtime.now()))
        return point

    def wait_event(self, event):
        event.wait(self)

    def synchronize(self):
        self._runtime.raise_failure()
        self._runtime.block_host(self.mark())


class Event:
    """What ``torch.cuda.Event`` gives."""

    def __init__(self, runtime, enable_timing):
        self._runtime, self._enable_timing = runtime, enable_timing
        self._point = None

    def record(self, stream=None):
        self._runtime.raise_failure()
        stream = self._runtime.current_stream() if stream is None else stream
        self._point = stream.mark()

    def wait(self, stream=None):
        self._runtime.raise_failure()
        stream = self._runtime.current_stream() if stream is None else stream
        if (point := self._point) is not None:
            stream.wait_for(point)

    def query(self):
        self._runtime.raise_failure()
        return self._point is None or self._point.has_passed

    def synchronize(self):
        self._runtime.raise_failure()
        if self._point is not None:
            self._runtime.block_host(self._point)

    def elapsed_time(self, end_event):
        if not (self._enable_timing and end_event._enable_timing):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self._point is None or end_event._point is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        if not (self.query() and end_event.query()):
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        return float(np.float32(1e3 * (end_event._point.time_s - self._point.time_s)))


class Status(enum.IntEnum):
    """CUDA's own numbers."""

    SUCCESS = 0
    INVALID_VALUE = 1
    MEMORY_ALLOCATION = 2
    ILLEGAL_ADDRESS = 700
    ALREADY_REGISTERED = 712
    NOT_REGISTERED = 713


class PageLocks:
    """The book of page-locked host memory, with CUDA's own errors, and what went wrong with it."""

    def __init__(self, runtime):
        self._runtime = runtime
        self._flying = []
        self.ranges = {}  # end of each locked range by its beginning, in whole pages
        self.faults = []  # what CUDA could not survive or would not notice
        self.limit_bytes = 1 << 40

    def cudaHostRegister(self, ptr, size, flags):
        begin, end = _pages(ptr, ptr + size)
        locked = sum(last - first for first, last in self.ranges.items())
        if size <= 0 or flags:
            return self._refuse(Status.INVALID_VALUE)
        if any(begin < last and first < end for first, last in self.ranges.items()):
            return self._refuse(Status.ALREADY_REGISTERED)
        if locked + end - begin > self.limit_bytes:
            return self._refuse(Status.MEMORY_ALLOCATION)
        self.ranges[begin] = end
        return Status.SUCCESS

    def cudaHostUnregister(self, ptr):
        if ptr not in self.ranges:
            self.faults.append(f"unlocked what is not locked: {ptr:#x}")
            return self._refuse(Status.NOT_REGISTERED)
        end = self.ranges.pop(ptr)
        if not _is_mapped(ptr, end):
            self.faults.append(f"unlocked after it was unmapped: {ptr:#x}")
        if self._runtime.failure is not None:
            return self._refuse(Status.ILLEGAL_ADDRESS)  # but pages of a dead process are unlocked
        for first, last, copied in self._flying:
            if first < end and ptr < last and not copied.has_passed:
                self.faults.append(f"unlocked while a copy was in flight: {ptr:#x}")
                self._runtime.block_host(copied)
        return Status.SUCCESS

    def hold(self, tensor):
        """Return whether all of a host tensor is page-locked."""
        first, last = _span(tensor)
        return any(begin <= first and last <= end for begin, end in self.ranges.items())

    def fly(self, tensor, copied):
        """A copy of page-locked memory is in flight until ``copied``."""
        self._flying = [entry for entry in self._flying if not entry[2].has_passed]
        self._flying.append((*_span(tensor), copied))

    def _refuse(self, status):
        self._runtime.here.last_error = status
        return status


def _pages(first, last):
    return first // mmap.PAGESIZE * mmap.PAGESIZE, -(-last // mmap.PAGESIZE) * mmap.PAGESIZE


def _span(tensor):
    return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes


def _is_mapped(first, last):
    resident = (ctypes.c_ubyte * (-(-(last - first) // mmap.PAGESIZE)))()
    where = ctypes.c_void_p(first), ctypes.c_size_t(last - first)
    return ctypes.CDLL(None).mincore(*where, resident) == 0


class CudaRuntime:
    """What lies under ``torch.cuda``; methods have the names and parameters they have there.

    A ``late.World`` works the streams off.
    """

    def __init__(self, world):
        self.world = world
        self.here = threading.local()
        self.failure, self.has_ended, self.age_s = None, False, 0.0
        self.streams = []
        self.memory = {"free": 30, "total": 100, "reserved": 60, "allocated": 40, "peak": 50}
        self.page_locks = PageLocks(self)
        self._default = [self.Stream(index) for index in range(2)]
        self.allocator = self.Stream(0)  # frees what other streams have used

    def Stream(self, device=None, priority=0):
        device = torch.device("cuda", self._index(device))
        self.streams.append(Stream(self, device))
        return self.streams[-1]

    def Event(self, enable_timing=False, blocking=False, interprocess=False, external=False):
        return Event(self, enable_timing)

    def current_device(self):
        return getattr(self.here, "device", 0)

    def set_device(self, device):
        self.here.device = self._index(device)

    @contextlib.contextmanager
    def device(self, device):
        before = self.current_device()
        self.set_device(device)
        try:
            yield
        finally:
            self.set_device(before)

    def current_stream(self, device=None):
        index = self._index(device)
        return self._selected().get(index, self._default[index])

    @contextlib.contextmanager
    def stream(self, stream):
        before = self.current_stream(stream.device)
        with self.device(stream.device):
            self._selected()[stream.device.index] = stream
            try:
                yield
            finally:
                self._selected()[stream.device.index] = before

    def synchronize(self, device=None):
        self.raise_failure()
        index = self._index(device)
        for point in [stream.mark() for stream in self.streams if stream.device.index == index]:
            self.block_host(point)

    def cudart(self):
        return self.page_locks

    def get_device_properties(self, device=None):
        bus = 0x3B + self._index(device)
        return SimpleNamespace(pci_domain_id=0, pci_bus_id=bus, pci_device_id=2)

    def mem_get_info(self, device=None):
        return self.memory["free"], self.memory["total"]

    def memory_reserved(self, device=None):
        return self.memory["reserved"]

    def memory_allocated(self, device=None):
        return self.memory["allocated"]

    def max_memory_allocated(self, device=None):
        return self.memory["peak"]

    def launch(self, kernel, device=None):
        """Queue a kernel on the current stream, which it may not hold a device tensor alive on."""
        self.raise_failure()
        error, self.here.last_error = getattr(self.here, "last_error", 0), 0
        if error:
            raise torch.AcceleratorError(f"CUDA error: {error!r}, of an earlier call")
        self.current_stream(device).put(kernel)

    def now(self):
        return time.perf_counter() + self.age_s

    def raise_failure(self):
        if self.failure is not None:
            raise torch.AcceleratorError(f"CUDA error: {self.failure}") from self.failure

    def block_host(self, point):
        has_passed = self.world.until(lambda: point.has_passed)
        self.raise_failure()
        assert has_passed, "the host waits for ever"

    def _selected(self):
        return self.here.__dict__.setdefault("selected", {})

    def _index(self, device):
        index = device if device is None or isinstance(device, int) else torch.device(device).index
        return self.current_device() if index is None else index
