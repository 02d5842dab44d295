"""A device made of threads, so that every ordering rule can be tested without a GPU.

Its memory is host memory. Each lane is a thread that works through a queue; events and waits have
CUDA's meaning. Fresh and released slots are filled with NaN, and work can be delayed at random, so
that a missing wait shows as a wrong result instead of passing by luck.
"""

from __future__ import annotations

import atexit
import math
import mmap
import queue
import random
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from deep_optimizer_states.core.device.base import (
    WAIT_TIMEOUT_S,
    Device,
    Event,
    Reached,
    Stamp,
    Wait,
)
from deep_optimizer_states.core.kernels.adam import AdamScalars, AdamTensors
from deep_optimizer_states.core.kernels.host import HostAdam
from deep_optimizer_states.core.threads import Latch, run_guarded
from deep_optimizer_states.errors import UpdateError

WAIT = "wait: "
"""Begins the name of work in which a lane waits for another."""
LONGEST_END_S = 60.0
"""The process waits so long for all lanes before it ends, and no longer for one that hangs."""


@dataclass(frozen=True)
class Faults:
    """Rules that tests break on purpose.

    Attributes:
        jitter_s: Longest random delay before each piece of work, in seconds.
        seed: Seed of the delays.
        without: Waits that are left out.
        timeout_s: Bound of every blocking wait, in seconds.
    """

    jitter_s: float = 0.0
    seed: int = 0
    without: frozenset[Wait] = frozenset()
    timeout_s: float = WAIT_TIMEOUT_S


class _ThreadEvent:
    """Set by a lane's thread when it reaches the point; carries the failure before it, if any."""

    def __init__(self, lane: _ThreadLane, after: str, timeout_s: float) -> None:
        self._lane = lane
        self._where = f"lane {lane.name} ({after})"
        self._timeout_s = timeout_s
        self._reached = Latch(lane.is_alive)
        self._failure: UpdateError | None = None

    def reach(self, failure: UpdateError | None) -> None:
        self._failure = failure
        self._reached.set()

    def reached(self) -> bool:
        return self._reached.is_set

    def synchronize(self) -> None:
        if not self._reached.wait(self._timeout_s):
            if not self._lane.is_alive():
                raise UpdateError(f"the thread of {self._where} has ended before its work")
            raise UpdateError(f"waited {self._timeout_s:g} s for {self._where}")
        if self._failure is not None:
            raise self._failure


class _Stamp:
    """A look at the clock on a lane's thread."""

    def __init__(self) -> None:
        self.time_s = math.nan

    def take(self) -> None:
        self.time_s = time.perf_counter()

    def seconds_since(self, other: Stamp) -> float:
        assert isinstance(other, _Stamp), other
        return self.time_s - other.time_s


_LANES: weakref.WeakSet[_ThreadLane] = weakref.WeakSet()


@atexit.register
def _end_lanes() -> None:
    """Let lanes finish before Python ends: a thread that is in torch then aborts the process."""
    deadline_s = time.monotonic() + LONGEST_END_S
    for lane in list(_LANES):
        lane.end(max(0.0, deadline_s - time.monotonic()))


class _ThreadLane:
    """A FIFO thread. After a failure it does no more work but still reaches its events."""

    def __init__(self, name: str, faults: Faults) -> None:
        self.name = name
        self._faults = faults
        self._random = random.Random(f"{faults.seed}/{name}")
        self._queue: queue.SimpleQueue[tuple[str, Callable[[], None]] | None] = queue.SimpleQueue()
        self._failure: UpdateError | None = None
        self._last = "nothing yet"
        self._is_closed = False
        _LANES.add(self)
        self._start()

    def _start(self) -> None:
        self._has_ended = False
        self._item: tuple[str, Callable[[], None]] = ("nothing yet", lambda: None)
        self._thread = threading.Thread(
            target=run_guarded,
            args=(self._run, self._go_on_after),
            name=f"deep_optimizer_states/{self.name}",
            daemon=True,
        )
        try:
            self._thread.start()
        except BaseException:
            self._queue.put(None)  # it may run already
            raise

    def is_alive(self) -> bool:
        """Return whether there is a thread that works the queue off."""
        return self._thread.is_alive()

    def submit(self, what: str, work: Callable[[], None], uses: Sequence[Tensor] = ()) -> None:
        self._require_open(what)
        self._last = what
        self._queue.put((what, work))

    def wait(self, event: Event, why: Wait) -> None:
        if why not in self._faults.without:
            self._queue.put((f"{WAIT}{why}", event.synchronize))

    def record(self) -> Event:
        self._require_open("an event")
        event = _ThreadEvent(self, self._last, self._faults.timeout_s)
        self._queue.put(("", lambda: event.reach(self._failure)))
        return event

    def stamp(self) -> Stamp:
        self._require_open("a look at the clock")
        stamp = _Stamp()
        self._queue.put(("", stamp.take))
        return stamp

    def forget_failure(self) -> None:
        def forget() -> None:
            self._failure = None

        if not self.is_alive():
            # What it has left undone must not land in state that is loaded afterwards.
            self._failure = UpdateError(f"the thread of lane {self.name} has ended")
            self._start()
        self._queue.put(("", forget))

    def close(self) -> None:
        self._is_closed = True
        self.end(self._faults.timeout_s)

    def end(self, within_s: float) -> None:
        """Finish what is queued, and end the thread."""
        self._queue.put(None)
        self._thread.join(within_s)

    def _require_open(self, what: str) -> None:
        if self._is_closed:
            raise UpdateError(f"lane {self.name} was closed before {what}; the engine is destroyed")

    def _run(self) -> None:
        # No deadline: work may come as long as the lane is open. The process does not wait for it.
        while (item := self._queue.get()) is not None:
            self._item = item
            what, work = item
            if not what:
                work()
            elif self._failure is None:
                self._attempt(what, work)
        self._has_ended = True

    def _go_on_after(self, failure: BaseException | None) -> None:
        """Fail, and let through whoever waits for an event, when the bookkeeping itself failed."""
        if failure is None or self._has_ended:
            return
        what, work = self._item
        self._fail(what or "its bookkeeping", failure)
        if not what:
            work()
        self._run()

    def _attempt(self, what: str, work: Callable[[], None]) -> None:
        if self._faults.jitter_s:
            time.sleep(self._random.uniform(0.0, self._faults.jitter_s))
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - re-raised in the caller by synchronize()
            self._fail(what, error)

    def _fail(self, what: str, error: BaseException) -> None:
        if isinstance(error, UpdateError):  # of a lane that this one waited for
            self._failure = error
        else:
            self._failure = UpdateError(f"lane {self.name}, {what}: {error!r}")
            self._failure.__cause__ = error


class EmulatedDevice(Device):
    """Five lanes as threads over host memory.

    Args:
        adam: The host kernel, which is also the device's: same bits by construction.
        faults: What a test breaks on purpose.
    """

    def __init__(self, adam: HostAdam, faults: Faults | None = None) -> None:
        self._adam = adam
        self._faults = faults or Faults()
        self._lanes: list[_ThreadLane] = []
        lane: _ThreadLane | None = None
        try:
            for name in ("H2D", "GPU", "D2H", "weights", "grads"):
                lane = _ThreadLane(name, self._faults)
                self._lanes.append(lane)
        except BaseException:
            if lane is not None:
                lane.close()  # the newest may not be in the list
            self.close()  # nobody else has them
            raise
        self.h2d, self.compute, self.d2h, self.weights, self.grads = self._lanes

    @override
    def empty_host(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(numel, dtype=dtype, device="cpu")

    @override
    def host_home(self, source: Tensor) -> Tensor:
        if not self.has_own_pages or not source.numel():
            return source  # any host memory will do
        pages = mmap.mmap(-1, source.nbytes)
        return torch.frombuffer(pages, dtype=source.dtype, count=source.numel()).copy_(source)

    @override
    def empty_device(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.full((numel,), torch.nan, dtype=dtype, device="cpu")

    @override
    def release_slot(self, tensors: Sequence[Tensor]) -> None:
        def poison() -> None:
            for tensor in tensors:
                tensor.fill_(torch.nan)

        self.d2h.submit("poisoning of a slot", poison)

    @override
    def record_caller(self) -> Event:
        return Reached()  # the caller's own work here is synchronous

    @override
    def caller_waits(self, event: Event, why: Wait) -> None:
        self.host_waits(event, why)

    @override
    def host_waits(self, event: Event, why: Wait) -> None:
        if not self.leaves_out(why):
            event.synchronize()

    @override
    def leaves_out(self, why: Wait) -> bool:
        return why in self._faults.without

    @override
    def adam(self, tensors: AdamTensors, scalars: AdamScalars, tail_start: int) -> None:
        # One thread: a second team of OpenMP threads would fight the CPU lane's for the cores.
        self._adam.step(tensors, scalars, tail_start, num_threads=1)

    @override
    def close(self) -> None:
        for lane in self._lanes:
            lane.close()
