"""Run actions on a device: issue each on its lane, with the waits that make it exact.

[Note: slots] Away from its home, a tile's master weights, moments and gradient live in one of
``NUM_SLOTS`` device slots while it is stepped. With three, one is prefetched, one stepped and one
flushed at the same time. A slot is prefetched into again only after its flush.

[Note: ahead] Master weights and moments do not depend on gradients. While backward runs, those of
some tiles go into device memory of their own, taken on the caller's stream and given back to the
caching allocator once the tile's state is flushed. They are a copy until the update takes the tile:
before that they can be dropped, and must be when state at home is written.

[Note: weights on the host] With ``offload_param`` 16-bit weights live in host memory. The CPU lane
writes them there itself, and stages nothing. The device writes them into the tile's slot, or for a
resident tile into an outbox, and they go home on the ``d2h`` lane, before the state: a gather reads
host memory, and the host waits until they are there.

[Note: staging] The CPU lane writes 16-bit weights into one of a few host buffers, so that the next
tiles are stepped while the last one's weights are sent. A GPU's link does the copies of a stream
that has more of them before it turns to another stream: beside prefetches that follow each other,
weights wait until there is none, and the CPU for a buffer (half of an update on an H200). So a
prefetch waits for weights that were sent before it was issued, and few are issued ahead.

[Note: lists] Tensors are gathered in lists and never in generators: a tuple that is built from a
generator can be seen half-made by ``gc.get_objects()`` in another thread, and Python then raises
``SystemError`` here.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deep_optimizer_states.core.device.base import Device, Event, Reached, Stamp, Wait
from deep_optimizer_states.core.kernels.adam import AdamScalars, AdamTensors
from deep_optimizer_states.core.kernels.host import HostAdam
from deep_optimizer_states.core.plan import Action, Kind, Plan
from deep_optimizer_states.core.policies import Flight, HostStep, PlaceTile, RunTimeSplit
from deep_optimizer_states.core.schedule import (
    NUM_AHEAD,
    NUM_OUTBOXES,
    NUM_SLOTS,
    NUM_STAGING_BUFFERS,
    Schedule,
)
from deep_optimizer_states.errors import UpdateError


@dataclass(frozen=True)
class TileArgs:
    """All that the step of one tile needs.

    Attributes:
        name: Its name in errors.
        tensors: State, gradient and weights where they live.
        scalars: Adam's scalars.
        tail_start: First element rounded as a tail.
        device_grad: The gradient on the device, where it is kept there; it needs no prefetch.
    """

    name: str
    tensors: AdamTensors
    scalars: AdamScalars
    tail_start: int
    device_grad: Tensor | None = None

    @property
    def grad(self) -> Tensor:
        """The gradient that the step goes by."""
        return self.tensors.grad if self.device_grad is None else self.device_grad


@dataclass(frozen=True)
class Types:
    """Types of what an executor's buffers hold; of master weights and moments the widest.

    ``weights`` are those that the model computes with.
    """

    grad: torch.dtype
    weights: torch.dtype
    master: torch.dtype = torch.float32
    moments: torch.dtype = torch.float32


class _Buffers:
    """Buffers of one kind, and the events that say what may be done with them."""

    def __init__(self, tensors: tuple[Tensor, ...], is_kept: bool = True) -> None:
        self.tensors = tensors
        self.is_kept = is_kept
        self.filled: Event | None = None
        self.stepped: Event | None = None
        self.free: Event | None = None
        self.begin: Stamp | None = None

    def views(self, numel: int) -> list[Tensor]:
        return [tensor.narrow(0, 0, numel) for tensor in self.tensors]

    def views_like(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return room for each of ``tensors`` in its type, perhaps narrower than the buffer's."""
        pairs = zip(self.tensors, tensors, strict=False)
        return [mine.view(like.dtype).narrow(0, 0, like.numel()) for mine, like in pairs]


class Executor:
    """Runs a step's actions.

    Attributes:
        ahead: Tiles whose state was sent ahead and that no update has claimed.
        claimed: Tiles whose state was sent ahead and that the update is still to step.
        last_plan: What the last update did, in issue order.
        before_overwrite: Called on the update's thread with each tile whose state is about to be
            overwritten in host memory.
        split: Splits tiles between device and CPU as they run.

    Args:
        schedule: The tiles for which it takes buffers.
        types: Of their tensors.
        device: Where device tiles are stepped.
        host_adam: The CPU lane's kernel.
        num_threads: Of the CPU lane.
        by_iteration: Whether the split is judged by whole iterations, as under policy ``auto``.
    """

    def __init__(
        self,
        schedule: Schedule,
        types: Types,
        device: Device,
        host_adam: HostAdam,
        num_threads: int,
        by_iteration: bool = False,
    ) -> None:
        self._num_threads = num_threads
        self._device = device
        self._host_adam = host_adam
        self._weights_on_host = schedule.weights_on_host
        self._dtypes = [types.master, types.moments, types.moments, types.grad]
        if schedule.weights_on_host:
            self._dtypes.append(types.weights)
        slot, outbox, staging = schedule.slot_numel, schedule.outbox_numel, schedule.staging_numel
        self._slots = [
            _Buffers(tuple([device.empty_device(slot, dtype) for dtype in self._dtypes]))
            for _ in range(NUM_SLOTS if slot else 0)
        ]
        self._outboxes = [
            _Buffers((device.empty_device(outbox, types.weights),))
            for _ in range(NUM_OUTBOXES if outbox else 0)
        ]
        self._staging = [
            _Buffers((device.empty_host(staging, types.weights),))
            for _ in range(NUM_STAGING_BUFFERS if staging else 0)
        ]
        self._next_slot = itertools.cycle(self._slots)
        self._next_staging = itertools.cycle(self._staging)
        self._next_outbox = itertools.cycle(self._outboxes)
        self._upcoming = next(self._next_slot, None)
        self._weights_sent: Event | None = None
        self._held: dict[int, _Buffers] = {}
        self.ahead: dict[int, _Buffers] = {}
        self.claimed: dict[int, _Buffers] = {}
        self._came_ahead: list[int] = []
        self._unflushed: dict[int, Event | None] = {}
        self.split = RunTimeSplit(by_iteration)
        self._is_sharing = False
        self._in_flight: deque[tuple[Event, int]] = deque()
        self._flights: list[tuple[int, Stamp, Stamp]] = []
        self._host_steps: list[HostStep] = []
        self._on_issued: Callable[[int, Event], None] = lambda tile, event: None
        self.last_plan = Plan(0, ())
        self.before_overwrite: Callable[[int], None] = lambda tile: None
        self._issue: dict[Kind, Callable[[int, TileArgs], None]] = {
            Kind.PREFETCH: self._prefetch,
            Kind.DEVICE_STEP: self._device_step,
            Kind.STATE_FLUSH: self._state_flush,
            Kind.HOST_STEP: self._host_step,
            Kind.WEIGHTS: self._send_weights,
        }

    @property
    def away(self) -> Collection[int]:
        """Tiles whose state was sent ahead and is not dropped or home again, as of now."""
        claimed = self._unflushed.copy().items()
        return [*self.ahead, *(tile for tile, free in claimed if not (free and free.reached()))]

    def claim(self, tiles: Iterable[int]) -> None:
        """Keep what was sent ahead of ``tiles`` for the update that is about to get them."""
        for tile in tiles:
            if tile in self.ahead:
                self.claimed[tile] = self.ahead.pop(tile)
                self._unflushed[tile] = None

    @property
    def num_under_way_ahead(self) -> int:
        """Number of tiles on their way ahead."""
        return sum(not own.filled.reached() for own in self.ahead.values() if own.filled)

    @property
    def element_bytes(self) -> int:
        """Device memory that state ahead of the update takes, bytes an element."""
        return sum(dtype.itemsize for dtype in self._dtypes)

    def send_ahead(self, tile: int, name: str, state: Sequence[Tensor]) -> None:
        """Prefetch a tile's master weights and moments; call it on the caller's thread.

        Args:
            tile: Its number.
            name: For errors.
            state: Where they live, each 1-D; no update is in flight there.

        Raises:
            torch.OutOfMemoryError: The device has no room.
        """
        numel, lane = state[0].numel(), self._device.h2d
        own = _Buffers(
            tuple([self._device.empty_device(numel, dtype) for dtype in self._dtypes]),
            is_kept=False,
        )
        targets = own.views_like(state)
        # The allocator may hand out memory that work of the caller's stream still uses.
        lane.wait(self._device.record_caller(), Wait.MEMORY_IDLE)
        lane.submit(f"state of {name} ahead", lambda: copy_all(targets, state), uses=own.tensors)
        own.filled = lane.record()
        self.ahead[tile] = own

    def drop_ahead(self) -> None:
        """Give memory of state sent ahead back, but for what an update has claimed."""
        self.ahead.clear()

    def start_split(self, tiles: Sequence[int], numels: Sequence[int]) -> PlaceTile:
        """Split tiles between device and CPU as they run, see :class:`RunTimeSplit`."""
        self._is_sharing = True
        return self.split.start_split(tiles, numels, self._in_flight_numel)

    def _in_flight_numel(self) -> int:
        """Return the elements given to the device whose state is not back yet."""
        while self._in_flight and self._in_flight[0][0].reached():
            self._in_flight.popleft()
        return sum(numel for _, numel in self._in_flight)

    def has_room(self, wait: bool) -> bool:
        """Return whether the device may be given one more tile, see ``schedule.NUM_AHEAD``.

        Args:
            wait: Block until it may.
        """
        while len(self._in_flight) >= NUM_AHEAD:
            landed, _ = self._in_flight[0]
            if not landed.reached():
                if not wait:
                    return False
                landed.synchronize()
            self._in_flight.popleft()
        return True

    def reset(self) -> None:
        """Forget an update that failed; the lanes are idle and what they wrote counts no more."""
        self._weights_sent = None
        self._held.clear()
        self.ahead.clear()
        self.claimed.clear()
        self._unflushed.clear()
        for buffers in (*self._slots, *self._outboxes, *self._staging):
            buffers.filled = buffers.stepped = buffers.free = None

    def caller_events(self) -> tuple[Event, Event]:
        """Return what an update launched now must wait for; call it on the caller's thread.

        Returns:
            The caller's own work so far, and the gradient flushes so far.
        """
        return self._device.record_caller(), self._device.grads.record()

    def follow(self, after: tuple[Event, Event]) -> None:
        """Order what is issued from now on after the caller's work."""
        # Weights are still being read by what the caller has queued (backward, all-gathers); slots
        # may be memory that it used before.
        caller, grads = after
        for lane in (self._device.h2d, self._device.compute, self._device.weights):
            lane.wait(caller, Wait.WEIGHTS_IDLE)
        if self._weights_on_host:  # the CPU writes them, and no lane
            self._device.host_waits(caller, Wait.WEIGHTS_IDLE)
        # Gradients reach their homes on a lane of their own; both Adams read them from there.
        self._device.host_waits(grads, Wait.GRADS_FLUSHED)

    def run(
        self,
        work: Sequence[TileArgs] | Mapping[int, TileArgs],
        actions: Iterable[Action],
        on_issued: Callable[[int, Event], None],
        is_norm_known: Callable[[], bool] = lambda: True,
    ) -> None:
        """Update every tile; returns when all state and weights are in place.

        Args:
            work: What each tile needs, by index; complete when the actions end.
            actions: What to do, in order; may be decided while it runs. ``last_plan`` holds it
                afterwards. They call :meth:`follow` where they come from the caller.
            on_issued: Called with each tile and the event after which its weights are written and
                its gradient has been read.
            is_norm_known: Whether the gradients' norm is known by now.

        Raises:
            PlanError: The actions do not step every tile once.
            UpdateError: Work on a lane failed or did not end in time.
        """
        begin = time.perf_counter()
        self._on_issued = on_issued
        self._is_sharing = False
        self._in_flight.clear()
        self._flights.clear()
        self._host_steps.clear()
        done, before_norm = [], 0
        self._came_ahead.clear()
        try:
            for action in actions:
                before_norm += not is_norm_known()
                self._issue[action.kind](action.tile, work[action.tile])
                done.append(action)
        except BaseException:
            # What the lanes have been given must not land in state that is loaded afterwards.
            with contextlib.suppress(UpdateError):
                self._device.synchronize()
            raise
        self._device.synchronize()
        self._unflushed.clear()
        self.claimed.clear()  # of tiles that had to be stepped where their state lives
        sent = [Action(tile, Kind.AHEAD) for tile in self._came_ahead]
        self.last_plan = Plan(len(work), (*sent, *done), len(sent) + before_norm)
        if self._is_sharing:
            self._learn(time.perf_counter() - begin)

    def _learn(self, seconds: float) -> None:
        first = self._flights[0][1] if self._flights else None
        flights = [
            Flight(numel, begin.seconds_since(first), end.seconds_since(first))
            for numel, begin, end in self._flights
            if first is not None
        ]
        self.split.learn(self._host_steps, flights, seconds)

    def _prefetch(self, tile: int, work: TileArgs) -> None:
        own, lane = self.claimed.pop(tile, None), self._device.h2d
        if self._weights_sent is not None:  # see [Note: staging]
            lane.wait(self._weights_sent, Wait.WEIGHTS_FIRST)
        if own is not None:
            self._held[tile] = own
            self._came_ahead.append(tile)
            if work.device_grad is None:
                what, grad = f"gradient of {work.name}", work.tensors.grad
                lane.submit(what, lambda: copy_all([own.tensors[3]], [grad]))
                own.filled = lane.record()
            return
        slot = self._upcoming
        assert slot is not None, "no slot was allocated"
        self._upcoming = next(self._next_slot)
        self._held[tile] = slot
        if slot.free is not None:  # see [Note: slots]
            lane.wait(slot.free, Wait.SLOT_FREE)
        if self._is_sharing:
            slot.begin = lane.stamp()
        sources = [*work.tensors.state]
        if work.device_grad is None:
            sources.append(work.tensors.grad)
        targets = slot.views_like(sources)
        lane.submit(f"prefetch of {work.name}", lambda: copy_all(targets, sources))
        slot.filled = lane.record()

    def _device_step(self, tile: int, work: TileArgs) -> None:
        slot, lane = self._held.get(tile), self._device.compute
        tensors = work.tensors
        if slot is not None:
            assert slot.filled is not None, tile
            lane.wait(slot.filled, Wait.PREFETCHED)
            master, exp_avg, exp_avg_sq = slot.views_like(tensors.state)
            views = slot.views(tensors.numel)
            grad = views[3] if work.device_grad is None else work.device_grad
            weights = views[4] if self._weights_on_host else tensors.weights
            tensors = AdamTensors(master, exp_avg, exp_avg_sq, grad, weights)
        elif self._weights_on_host:  # see [Note: weights on the host]
            slot = self._held[tile] = next(self._next_outbox)
            if slot.free is not None:
                lane.wait(slot.free, Wait.STAGING_FREE)
            tensors = AdamTensors(*tensors.state, tensors.grad, *slot.views(tensors.numel))
        lane.submit(
            f"step of {work.name}",
            lambda: self._device.adam(tensors, work.scalars, work.tail_start),
        )
        stepped = lane.record()
        if slot is not None:
            slot.stepped = stepped
        if not self._weights_on_host:
            self._on_issued(tile, stepped)

    def _state_flush(self, tile: int, work: TileArgs) -> None:
        slot, lane = self._held.pop(tile), self._device.d2h
        assert slot.stepped is not None, tile
        lane.wait(slot.stepped, Wait.STEPPED)
        views = slot.views(work.tensors.numel)
        if self._weights_on_host:
            home, staged = (work.tensors.weights,), views[-1:]
            lane.submit(f"weights of {work.name}", lambda: copy_all(home, staged))
            self._on_issued(tile, lane.record())
        is_outbox = len(views) == 1
        # The last of the lanes that use memory of a tile's own: it is after all others.
        uses = () if slot.is_kept else slot.tensors
        if not is_outbox:
            self.before_overwrite(tile)
            targets = work.tensors.state
            sources = slot.views_like(targets)
            lane.submit(f"state flush of {work.name}", lambda: copy_all(targets, sources), uses)
        # The split learns the rate of slots: what is sent ahead takes less of the links.
        if self._is_sharing and slot.begin is not None and not is_outbox:
            self._flights.append((work.tensors.numel, slot.begin, lane.stamp()))
        self._device.release_slot(slot.tensors)
        slot.free = lane.record()
        if not slot.is_kept:
            self._unflushed[tile] = slot.free
        elif not is_outbox:
            self._in_flight.append((slot.free, work.tensors.numel))

    def _host_step(self, tile: int, work: TileArgs) -> None:
        self.before_overwrite(tile)
        wait, tensors = time.perf_counter(), work.tensors
        if not self._weights_on_host:
            tensors = self._stage(tile, tensors)
        begin = time.perf_counter()
        try:
            self._host_adam.step(tensors, work.scalars, work.tail_start, self._num_threads)
        except Exception as error:
            raise UpdateError(f"lane CPU, step of {work.name}: {error!r}") from error
        end = time.perf_counter()
        self._host_steps.append(HostStep(work.tensors.numel, begin - wait, end - begin))
        if self._weights_on_host:
            self._on_issued(tile, Reached())

    def _stage(self, tile: int, tensors: AdamTensors) -> AdamTensors:
        """Return the same with weights in a staging buffer, once it is free."""
        staging = self._held[tile] = next(self._next_staging)
        if staging.free is not None:  # see [Note: staging]
            self._device.host_waits(staging.free, Wait.STAGING_FREE)
        return AdamTensors(*tensors.state, tensors.grad, *staging.views(tensors.numel))

    def _send_weights(self, tile: int, work: TileArgs) -> None:
        staging, lane = self._held.pop(tile), self._device.weights
        staged, target = staging.views(work.tensors.numel), (work.tensors.weights,)
        lane.submit(f"weights of {work.name}", lambda: copy_all(target, staged))
        staging.free = self._weights_sent = lane.record()
        self._on_issued(tile, staging.free)


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy tensor by tensor, without blocking where the device can."""
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking=True)
