"""The interface of a device: lanes, events, memory of two kinds, and Adam.

A *lane* is one ordered queue of work. Work on one lane runs in the order of submission; lanes run
side by side and are ordered against each other only by events. ``submit`` and ``wait`` return at
once; only ``synchronize`` blocks the caller.
"""

from __future__ import annotations

import abc
import collections
import enum
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from deep_optimizer_states.core.host import ANYWHERE, LaneCores
from deep_optimizer_states.core.kernels.adam import AdamScalars, AdamTensors
from deep_optimizer_states.errors import UpdateError

WAIT_TIMEOUT_S = 600.0
"""Bound of every blocking wait, in seconds; far above any update, far below forever."""


class Wait(enum.StrEnum):
    """Why work waits; each member is one ordering rule, and a test removes each in turn.

    All but ``WEIGHTS_FIRST``, which saves time, keep the bits right.
    """

    SLOT_FREE = "a slot is prefetched into only after its last state flush"
    PREFETCHED = "the device steps only what has been prefetched"
    STEPPED = "state is flushed only after its step"
    STAGING_FREE = "weights are staged only in a buffer that has been sent"
    WEIGHTS_FIRST = "state is prefetched only after weights that were sent before it was issued"
    GRADS_FLUSHED = "the update reads gradients only after their flush"
    GRAD_READY = "a gradient is flushed only after backward has reduced it"
    GRAD_HOME = "a gradient is summed only onto one that has been flushed"
    WEIGHTS_READY = "a parameter is gathered or read only after its tiles are updated"
    GRAD_READ = "a gradient is overwritten only after the update has read it"
    WEIGHTS_IDLE = "weights are written only after backward has read them"
    MEMORY_IDLE = "memory is written only after work that was queued before it was taken"
    HOME_WHOLE = "state at home is read only after it has been flushed there"


class Event(Protocol):
    """A point in a lane's work that other lanes, or the host, can wait for."""

    def reached(self) -> bool:
        """Return whether the point is reached, without waiting."""

    def synchronize(self) -> None:
        """Block the caller until the point is reached.

        Raises:
            UpdateError: Work before the point failed, or it was not reached in time.
        """


class Reached:
    """An event already reached: of work that was done before it was asked for."""

    def reached(self) -> bool:
        """Return True."""
        return True

    def synchronize(self) -> None:
        """Return at once."""


class Stamp(Protocol):
    """The time of a point in a lane's work, once it is reached."""

    def seconds_since(self, other: Stamp) -> float:
        """Return the seconds from another stamp of the same device to this one."""


class Lane(Protocol):
    """One ordered queue of work."""

    name: str

    def submit(self, what: str, work: Callable[[], None], uses: Sequence[Tensor] = ()) -> None:
        """Queue ``work``.

        Args:
            what: Its name in errors, such as ``prefetch of subgroup 3``.
            work: Copies and kernels on tensors of this device or of pinned host memory.
            uses: Device tensors that the caller may drop before the work is done.
        """

    def wait(self, event: Event, why: Wait) -> None:
        """Hold back what is submitted after this until ``event``."""

    def record(self) -> Event:
        """Return an event reached when everything submitted so far is done."""

    def stamp(self) -> Stamp:
        """Return the time at which everything submitted so far was done, once it is."""

    def forget_failure(self) -> None:
        """Do work again after some failed, from what is submitted next on."""


class PendingBytes:
    """Keeps the memory of copies in flight bounded: past the bound, the oldest is waited for."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._bytes = 0
        self._events: collections.deque[tuple[Event, int]] = collections.deque()

    def add(self, event: Event, num_bytes: int) -> None:
        """Count a copy that ends at ``event``; blocks while too many are in flight."""
        self._events.append((event, num_bytes))
        self._bytes += num_bytes
        while self._events and (self._bytes > self._limit or self._events[0][0].reached()):
            oldest, size = self._events.popleft()
            oldest.synchronize()
            self._bytes -= size

    def clear(self) -> None:
        """Forget all copies; none is in flight."""
        self._events.clear()
        self._bytes = 0


class Device(abc.ABC):
    """A device with five lanes. Host memory it hands out is page-locked where that means something.

    Attributes:
        h2d: Prefetch of optimizer state into slots.
        compute: Adam on slots.
        d2h: Flush of optimizer state, and of 16-bit weights that live there, to the host.
        weights: 16-bit weights from the host.
        grads: Flush of gradients to the host, during backward.
    """

    h2d: Lane
    compute: Lane
    d2h: Lane
    weights: Lane
    grads: Lane
    cpu_affinity: LaneCores = ANYWHERE
    """Cores next to which a device that touches host memory itself takes it."""
    has_own_pages: bool = False
    """Give state whole pages, so that it can be written past the page cache; page-locked memory has
    them anyway."""
    locks_pages: bool = True
    """Page-lock host memory; copies of memory that is not overlap with nothing."""

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """Every lane."""
        return (self.h2d, self.compute, self.d2h, self.weights, self.grads)

    @abc.abstractmethod
    def empty_host(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Take host memory for copies that overlap, shape (numel,), uninitialised."""

    def host_home(self, source: Tensor) -> Tensor:
        """Return ``source``, shape (numel,), copied into such memory; perhaps ``source`` itself."""
        return self.empty_host(source.numel(), source.dtype).copy_(source)

    @abc.abstractmethod
    def empty_device(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Take device memory, shape (numel,), uninitialised."""

    @abc.abstractmethod
    def release_slot(self, tensors: Sequence[Tensor]) -> None:
        """Say, on the ``d2h`` lane, that a slot's content is dead (an emulator poisons it)."""

    @abc.abstractmethod
    def record_caller(self) -> Event:
        """Return an event of the caller's own work so far (its current stream)."""

    @abc.abstractmethod
    def caller_waits(self, event: Event, why: Wait) -> None:
        """Order the caller's later work (its current stream) after ``event``."""

    @abc.abstractmethod
    def host_waits(self, event: Event, why: Wait) -> None:
        """Block the host until ``event``."""

    @abc.abstractmethod
    def adam(self, tensors: AdamTensors, scalars: AdamScalars, tail_start: int) -> None:
        """Adam with the bits of the host kernel; runs as work of the ``compute`` lane.

        Args:
            tensors: What to update, on the device.
            scalars: Adam's scalars.
            tail_start: First element rounded as a tail; ``numel`` if none is.
        """

    @property
    def pci_address(self) -> str | None:
        """PCI address of the device, such as ``0000:3b:00.0``; None for none."""
        return None

    def leaves_out(self, why: Wait) -> bool:
        """Return whether a test wants this wait left out."""
        return False

    tells_memory: bool = False
    """Whether it is known how much of its memory is free."""

    def free_bytes(self) -> int:
        """Return the device memory that can be had now, a margin left out, or below 0 in it."""
        return 0

    def peak_bytes(self) -> tuple[int, int]:
        """Return the bytes that torch has allocated on the device: now, and at most so far."""
        return 0, 0

    def forget_failure(self) -> None:
        """Make lanes on which work failed do work again, once they are idle."""
        for lane in (self.h2d, self.compute, self.d2h, self.weights, self.grads):
            lane.forget_failure()

    def enter_thread(self) -> None:
        """Make the calling thread ready to work on this device."""
        return

    def synchronize(self) -> None:
        """Block until every lane is idle, those beside one that failed too.

        Raises:
            UpdateError: Work on a lane failed or did not end in time; the first such failure.
        """
        failure: UpdateError | None = None
        for lane in self.lanes:
            try:
                lane.record().synchronize()
            except UpdateError as error:
                failure = failure or error
        try:
            if failure is not None:
                raise failure
        finally:
            # Its traceback holds this frame: the two would keep host memory from being given back.
            del failure

    @abc.abstractmethod
    def close(self) -> None:
        """End threads and unlock host memory. The device is not usable afterwards."""
