"""Page-locked memory of the stand-in for CUDA: a book with CUDA's own errors."""

from __future__ import annotations

import ctypes
import enum
import mmap


class Status(enum.IntEnum):
    """CUDA's own numbers."""

    SUCCESS = 0
    INVALID_VALUE = 1
    MEMORY_ALLOCATION = 2
    ILLEGAL_ADDRESS = 700
    ALREADY_REGISTERED = 712
    NOT_REGISTERED = 713


class PageLocks:
    """The book of page-locked host memory, and what went wrong with it.

    Attributes:
        ranges: End of each locked range by its beginning, in whole pages.
        limit_bytes: What may be locked in all.
        faults: What CUDA could not survive or would not notice.
    """

    def __init__(self, runtime):
        self._runtime = runtime
        self._flying = []
        self.ranges, self.faults = {}, []
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
        """Whether all of a host tensor is page-locked."""
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
