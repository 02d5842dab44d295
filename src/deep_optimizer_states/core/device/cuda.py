"""The CUDA device: a stream a lane, page-locked host memory of exact size, Triton's Adam.

Host memory is private huge pages, written to by several threads before it is page-locked:
registering memory with CUDA needs every page in place. Left to CUDA, one thread faults them in, and
a shared mapping has small pages only.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from deep_optimizer_states.core.device.base import (
    WAIT_TIMEOUT_S,
    Device,
    Event,
    Stamp,
    Wait,
)
from deep_optimizer_states.core.host import DEVICE_MARGIN, LaneCores
from deep_optimizer_states.core.kernels.adam import AdamScalars, AdamTensors
from deep_optimizer_states.errors import UpdateError

if TYPE_CHECKING:
    from deep_optimizer_states.core.kernels.triton_adam import TritonAdam

_POLL_S = 0.0005
_CALLER = "the caller's stream"
_given_up: list[object] = []
"""Page-locked memory that a copy which did not end may still use; kept until the process ends."""


class _TimedOutError(UpdateError):
    """A wait was given up; what was waited for may be running still."""


@contextlib.contextmanager
def _naming(where: str) -> Iterator[None]:
    """Say where CUDA's error was seen: once a kernel has failed, any later call raises it."""
    try:
        yield
    except UpdateError:
        raise  # it says where already
    except RuntimeError as error:
        raise UpdateError(f"{where}: {error}") from error


class _StreamEvent:
    """A CUDA event whose blocking wait is bounded and does not keep a core busy."""

    def __init__(self, stream: torch.cuda.Stream, where: str, keep_time: bool = False) -> None:
        self.cuda = torch.cuda.Event(enable_timing=keep_time)
        self._where = where
        with _naming(where):
            self.cuda.record(stream)

    def seconds_since(self, other: Stamp) -> float:
        assert isinstance(other, _StreamEvent), other
        with _naming(self._where):
            return float(1e-3 * other.cuda.elapsed_time(self.cuda))

    def reached(self) -> bool:
        with _naming(self._where):
            return bool(self.cuda.query())

    def synchronize(self) -> None:
        deadline = time.monotonic() + WAIT_TIMEOUT_S
        while not self.reached():
            if time.monotonic() > deadline:
                raise _TimedOutError(f"waited {WAIT_TIMEOUT_S:g} s for {self._where}")
            time.sleep(_POLL_S)


class _StreamLane:
    """Work on one side stream."""

    def __init__(self, name: str, device: torch.device) -> None:
        self.name = name
        self._stream = torch.cuda.Stream(device)
        self._last = "nothing yet"

    def submit(self, what: str, work: Callable[[], None], uses: Sequence[Tensor] = ()) -> None:
        self._last = what
        with _naming(f"lane {self.name}, {what}"), torch.cuda.stream(self._stream):
            work()
        for tensor in uses:
            # The caching allocator must not hand the memory out again before the lane is done.
            tensor.record_stream(self._stream)

    def wait(self, event: Event, why: Wait) -> None:
        assert isinstance(event, _StreamEvent), event
        with _naming(self._where):
            self._stream.wait_event(event.cuda)

    def stamp(self) -> Stamp:
        return _StreamEvent(self._stream, self._where, keep_time=True)

    def record(self) -> Event:
        return _StreamEvent(self._stream, self._where)

    def forget_failure(self) -> None:
        return  # after an error CUDA does no work for this process any more

    @property
    def _where(self) -> str:
        return f"lane {self.name} ({self._last})"


class CudaDevice(Device):
    """Five streams of the current CUDA device.

    Args:
        tail_mode: How DeepSpeed's host kernel rounds the last elements; the device repeats it.
    """

    tells_memory = True

    def __init__(self, tail_mode: int) -> None:
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._tail_mode = tail_mode
        self._locked: list[weakref.finalize[..., Any]] = []
        self.h2d, self.compute, self.d2h, self.weights, self.grads = (
            _StreamLane(name, self._device) for name in ("H2D", "GPU", "D2H", "weights", "grads")
        )

    @override
    def empty_host(self, numel: int, dtype: torch.dtype) -> Tensor:
        if numel == 0 or not self.locks_pages:
            return torch.empty(numel, dtype=dtype, device="cpu")
        # Not pin_memory=True: torch rounds page-locked allocations up to powers of two. Whole pages
        # of our own, because a page cannot be locked twice for two tensors that share it.
        pages = take_pages(numel * dtype.itemsize, self.cpu_affinity)
        tensor = torch.frombuffer(pages, dtype=dtype, count=numel)
        status = int(_cudart().cudaHostRegister(tensor.data_ptr(), len(pages), 0))
        if status != 0:
            _forget_last_error(self._device)  # before anything else: a warning may be an error
            warnings.warn(
                f"CUDA could not page-lock {len(pages)} bytes of host memory (error {status}); "
                "copies of it will not overlap with anything. See how much memory is free",
                stacklevel=2,
            )
            return tensor
        # Also when the pages go away without close(): a later mapping may get their address.
        unlock = weakref.finalize(pages, _unlock, tensor.data_ptr())
        unlock.atexit = False  # of a GPU that hangs, it would never end; the system unlocks
        self._locked.append(unlock)
        return tensor

    @override
    def empty_device(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(numel, dtype=dtype, device=self._device)

    @override
    def release_slot(self, tensors: Sequence[Tensor]) -> None:
        return

    @override
    def record_caller(self) -> Event:
        return _StreamEvent(torch.cuda.current_stream(self._device), _CALLER)

    @override
    def caller_waits(self, event: Event, why: Wait) -> None:
        assert isinstance(event, _StreamEvent), event
        with _naming(_CALLER):
            torch.cuda.current_stream(self._device).wait_event(event.cuda)

    @override
    def host_waits(self, event: Event, why: Wait) -> None:
        event.synchronize()

    @override
    def adam(self, tensors: AdamTensors, scalars: AdamScalars, tail_start: int) -> None:
        self._adam.step(tensors, scalars, tail_start)

    @functools.cached_property
    def _adam(self) -> TritonAdam:
        # Only when the device steps something: Triton may be missing where it never does.
        from deep_optimizer_states.core.kernels.triton_adam import TritonAdam

        return TritonAdam(self._tail_mode)

    @property
    @override
    def pci_address(self) -> str | None:
        found = torch.cuda.get_device_properties(self._device)
        # torch does not declare them, and a build for other devices may not have them.
        names = ("pci_domain_id", "pci_bus_id", "pci_device_id")
        domain, bus, slot = (getattr(found, name, None) for name in names)
        if domain is None or bus is None or slot is None:
            return None
        return f"{domain:04x}:{bus:02x}:{slot:02x}.0"

    @override
    def free_bytes(self) -> int:
        free, total = torch.cuda.mem_get_info(self._device)
        now, _ = self.peak_bytes()
        return int(free + torch.cuda.memory_reserved(self._device) - now - DEVICE_MARGIN * total)

    @override
    def peak_bytes(self) -> tuple[int, int]:
        now = torch.cuda.memory_allocated(self._device)
        return now, torch.cuda.max_memory_allocated(self._device)

    @override
    def enter_thread(self) -> None:
        torch.cuda.set_device(self._device)  # the current device is a thread's own

    @override
    def close(self) -> None:
        try:
            self.synchronize()  # bounded, and it names the lane
            self.record_caller().synchronize()
            with _naming("the device"):
                # No deadline: what is on the streams that we know has ended by now, in time.
                torch.cuda.synchronize(self._device)
        except (_TimedOutError, KeyboardInterrupt):
            # CUDA would wait for the copy before it unlocks, without a bound.
            _given_up.extend(unlock.detach() for unlock in self._locked)
            raise
        finally:
            for unlock in self._locked:
                unlock()
            self._locked.clear()


def _forget_last_error(device: torch.device) -> None:
    """Clear the error that CUDA keeps for this thread after a call of ours was refused.

    torch would raise it at the thread's next kernel, as if that had failed. torch does not offer
    ``cudaGetLastError``, so a kernel of no use takes the error: checking its launch clears it.
    """
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device=device)


@functools.cache
def _cudart() -> Any:
    return torch.cuda.cudart()


def _unlock(address: int) -> None:
    # The status is not looked at: after a CUDA failure everything fails, and pages still go away.
    _cudart().cudaHostUnregister(address)


PIECE_BYTES = 2**25
"""Bytes that a thread touches at a time; a multiple of every page size in use."""
Pages = ctypes.Array[ctypes.c_char]
_taken: weakref.WeakValueDictionary[int, Pages] = weakref.WeakValueDictionary()
_kept_by_child: list[Pages] = []


def take_pages(num_bytes: int, cpu_affinity: LaneCores) -> Pages:
    """Map fresh memory and put every page of it in place, next to the cores of ``near``.

    A process that forks (workers of a data loader) keeps the memory to itself: a child may hold
    tensors of it, and crashes only if it reads or writes them.

    Args:
        num_bytes: At least 1; rounded up to whole pages.
        cpu_affinity: Whose threads touch the pages: Linux puts a page next to the core that first
            touches it.

    Returns:
        The pages, zeroed. They are unmapped when nothing refers to them any more.
    """
    size = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # After a fork, whoever writes first to a private page gets a copy of it. That may be this
    # process, whose GPU would then go on copying from and to the old page.
    mapping.madvise(mmap.MADV_DONTFORK)
    with contextlib.suppress(OSError):  # a kernel without huge pages does with small ones
        mapping.madvise(mmap.MADV_HUGEPAGE)
    # An array around the mapping: a mapping is gone before its own weak references are called, and
    # its pages must be unlocked while they are there.
    pages = (ctypes.c_char * size).from_buffer(mapping)
    _touch(pages, cpu_affinity)
    _taken[ctypes.addressof(pages)] = pages
    return pages


def _touch(pages: Pages, cpu_affinity: LaneCores) -> None:
    """Write to one byte of each page; threads end afterwards, so they can be bound to cores."""
    view = np.frombuffer(memoryview(pages), dtype=np.uint8)

    def touch(first: int) -> None:
        view[first : first + PIECE_BYTES : mmap.PAGESIZE] = 0

    starts = range(0, len(pages), PIECE_BYTES)
    num_threads = min(cpu_affinity.num_threads, len(starts))
    with ThreadPoolExecutor(num_threads, initializer=cpu_affinity.bind_this_thread) as pool:
        list(pool.map(touch, starts))  # the list raises what a thread raised


# A forked child has none of this memory mapped. Were its copies of the objects collected, they
# would unmap whatever the child has mapped at these addresses since.
os.register_at_fork(after_in_child=lambda: _kept_by_child.extend(_taken.values()))
