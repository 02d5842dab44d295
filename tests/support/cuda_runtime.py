"""A stand-in for the CUDA runtime under ``torch.cuda``, for tests on a machine without a GPU.

What of CUDA it repeats (see ``cuda_memory`` for device tensors):

- A stream is a queue, worked off in order on a thread of its own, late and after random delays; the
  default stream as well (or all of them on the host's thread, see ``late``). Streams are ordered by
  events alone: torch's side streams do not wait for the default stream. Every thread has its
  current device, and a current stream for each device.
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
import queue
import random
import threading
import time
from types import SimpleNamespace

import numpy as np
import torch

_LOOK_S = 0.01
"""How often whoever waits looks whether the device broke or the stand-in ended."""


class Point:
    """A place in a stream's queue."""

    def __init__(self):
        self.passed = threading.Event()
        self.time_s = None

    @property
    def has_passed(self):
        return self.passed.is_set()

    def arrive(self, time_s):
        self.time_s = time_s
        self.passed.set()


class Stream:
    """One queue of a device; ``jitter_s`` is the longest delay before each piece of its work."""

    def __init__(self, runtime, device, number):
        self.device, self.jitter_s = device, runtime.jitter_s
        self._runtime = runtime
        self._random = random.Random(f"{runtime.seed}/{number}")
        self._queue = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, name=f"cuda/{number}", daemon=True)
        self.thread.start()

    def _run(self):
        while (work := self._queue.get()) is not None:
            if self.jitter_s:
                time.sleep(self._random.uniform(0, self.jitter_s))
            self._do(work)

    def _do(self, work):
        if self._runtime.failure is not None:
            return
        try:
            work()
        except Exception as error:  # noqa: BLE001 - every later call raises it
            self._runtime.failure = error

    def put(self, work):
        """Queue work that waits for nothing but what is queued before it; None ends the thread."""
        self._queue.put(work)

    def wait_for(self, point):
        """Queue a wait."""
        self.put(lambda: self._runtime.block_stream(point))

    def mark(self):
        """A point after all that is queued."""
        point = Point()
        self.put(lambda: point.arrive(self._runtime.now()))
        return point

    def wait_event(self, event):
        event.wait(self)

    def wait_stream(self, stream):
        self.wait_event(stream.record_event())

    def record_event(self, event=None):
        event = self._runtime.Event() if event is None else event
        event.record(self)
        return event

    def query(self):
        self._runtime.raise_failure()
        return self._queue.empty()

    def synchronize(self):
        self._runtime.raise_failure()
        self._runtime.block_host(self.mark())


class LateStream(Stream):
    """The same on the host's thread, when a ``late.World`` lets it."""

    name = ""

    def __init__(self, runtime, device, number):
        super().__init__(runtime, device, number)
        self._items = collections.deque()
        runtime.world.add(self)

    def _run(self):
        return

    def put(self, work):
        self._queue_up(None, work)

    def wait_for(self, point):
        self._queue_up(point, lambda: None)

    def _queue_up(self, after, work):
        if work is not None and not self._runtime.has_ended:
            self._items.append((after, work))
            self._runtime.world.hasten()

    def can_go(self):
        return bool(self._items) and (self._items[0][0] is None or self._items[0][0].has_passed)

    def go(self):
        self._do(self._items.popleft()[1])

    def query(self):
        self._runtime.raise_failure()
        return not self._items


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
        return self._point is None or self._point.passed.is_set()

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
            if first < end and ptr < last and not copied.passed.is_set():
                self.faults.append(f"unlocked while a copy was in flight: {ptr:#x}")
                self._runtime.block_host(copied)
        return Status.SUCCESS

    def hold(self, tensor):
        """Return whether all of a host tensor is page-locked."""
        first, last = _span(tensor)
        return any(begin <= first and last <= end for begin, end in self.ranges.items())

    def fly(self, tensor, copied):
        """A copy of page-locked memory is in flight until ``copied``."""
        self._flying = [entry for entry in self._flying if not entry[2].passed.is_set()]
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

    Delays are drawn by ``seed``; a ``late.World`` works the streams off without threads.
    """

    def __init__(self, seed=0, jitter_s=0.0, world=None):
        self.seed, self.jitter_s, self.world = seed, jitter_s, world
        self.here = threading.local()
        self.failure, self.has_ended, self.age_s = None, False, 0.0
        self.streams = []
        self.memory = {"free": 30, "total": 100, "reserved": 60, "allocated": 40, "peak": 50}
        self.page_locks = PageLocks(self)
        self._default = [self.Stream(index) for index in range(2)]
        self.allocator = self.Stream(0)  # frees what other streams have used

    def Stream(self, device=None, priority=0):
        device = torch.device("cuda", self._index(device))
        make = Stream if self.world is None else LateStream
        self.streams.append(make(self, device, len(self.streams)))
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
        if self.world is not None:
            assert self.world.until(lambda: point.has_passed), "the host waits for ever"
        while not point.passed.wait(_LOOK_S):
            self.raise_failure()
            assert not self.has_ended, "waits for a stand-in that has ended"
        self.raise_failure()

    def block_stream(self, point):
        while not point.passed.wait(_LOOK_S):
            if self.failure is not None or self.has_ended:
                return

    def end(self):
        """Let go of every thread; what is queued by now is done, as far as it can be."""
        for stream in self.streams:
            stream.put(None)
        self.has_ended = True
        for stream in self.streams:
            stream.thread.join(10)

    def _selected(self):
        return self.here.__dict__.setdefault("selected", {})

    def _index(self, device):
        index = device if device is None or isinstance(device, int) else torch.device(device).index
        return self.current_device() if index is None else index
