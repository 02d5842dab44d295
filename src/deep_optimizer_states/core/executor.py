"""Run actions on a device: issue each on its lane, with the waits that make it exact.

[Note: slots] Away from its home, a tile's master weights, moments and gradient live in one of
``NUM_SLOTS`` device slots while it is stepped. With three, one is prefetched, one stepped and one
flushed at the same time. A slot is prefetched into again only after its flush.

[Note: places] A tile of :mod:`.cache` has device memory of its own instead. What of it is not there
yet is fetched, and it is stepped in place. One that may not stay is flushed like a slot, and its
memory goes back to the caching allocator.

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
from collections.abc import Callable, Iterable, Sequence

from deep_optimizer_states.core.cache import Buffers, Content, TileCache, copy_all
from deep_optimizer_states.core.device.base import Event, Reached, Stamp, Wait
from deep_optimizer_states.core.kernels.adam import AdamTensors
from deep_optimizer_states.core.kernels.host import HostAdam
from deep_optimizer_states.core.plan import Action, Kind, Plan
from deep_optimizer_states.core.policies import Flight, HostStep, PlaceTile, RunTimeSplit
from deep_optimizer_states.core.schedule import (
    NUM_AHEAD,
    NUM_OUTBOXES,
    NUM_SLOTS,
    NUM_STAGING_BUFFERS,
)
from deep_optimizer_states.core.update import After, TileArgs, Update
from deep_optimizer_states.errors import UpdateError


class Executor:
    """Runs a step's actions.

    Attributes:
        last_plan: What the last update did, in issue order.
        split: Splits tiles between device and CPU as they run.

    Args:
        cache: Tiles that have device memory of their own; it knows the others, types and device.
        host_adam: The CPU lane's kernel.
        num_threads: Of the CPU lane.
        by_iteration: Whether the split is judged by whole iterations, as under policy ``auto``.
    """

    def __init__(
        self, cache: TileCache, host_adam: HostAdam, num_threads: int, by_iteration: bool = False
    ) -> None:
        self._cache = cache
        self._num_threads = num_threads
        self._host_adam = host_adam
        device, schedule, types = cache.device, cache.schedule, cache.types
        self._device = device
        self._weights_on_host = schedule.weights_on_host
        dtypes = types.of_tile(schedule.weights_on_host)
        slot, outbox, staging = schedule.slot_numel, schedule.outbox_numel, schedule.staging_numel
        self._slots = [
            Buffers(tuple([device.empty_device(slot, dtype) for dtype in dtypes]))
            for _ in range(NUM_SLOTS if slot else 0)
        ]
        self._outboxes = [
            Buffers((device.empty_device(outbox, types.weights),))
            for _ in range(NUM_OUTBOXES if outbox else 0)
        ]
        self._staging = [
            Buffers((device.empty_host(staging, types.weights),))
            for _ in range(NUM_STAGING_BUFFERS if staging else 0)
        ]
        self._next_slot = itertools.cycle(self._slots)
        self._next_staging = itertools.cycle(self._staging)
        self._next_outbox = itertools.cycle(self._outboxes)
        self._upcoming = next(self._next_slot, None)
        self._weights_sent: Event | None = None
        self._held: dict[int, Buffers] = {}
        self._came_ahead: list[int] = []
        self.split = RunTimeSplit(by_iteration)
        self._is_sharing = False
        self._in_flight: deque[tuple[Event, int]] = deque()
        self._flights: list[tuple[int, Stamp, Stamp]] = []
        self._host_steps: list[HostStep] = []
        self._on_issued: Callable[[int, Event], None] = lambda tile, event: None
        self.last_plan = Plan(0, ())
        self._issue: dict[Kind, Callable[[int, TileArgs], None]] = {
            Kind.PREFETCH: self._prefetch,
            Kind.DEVICE_STEP: self._device_step,
            Kind.STATE_FLUSH: self._state_flush,
            Kind.HOST_STEP: self._host_step,
            Kind.WEIGHTS: self._send_weights,
        }

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
        self._cache.reset()
        for buffers in (*self._slots, *self._outboxes, *self._staging):
            buffers.filled = buffers.stepped = buffers.free = None

    def caller_events(self) -> After:
        """Return what an update launched now must wait for; call it on the caller's thread.

        Returns:
            The caller's own work so far, and the gradient flushes so far.
        """
        return self._device.record_caller(), self._device.grads.record()

    def follow(self, after: After) -> None:
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

    def run(self, update: Update, actions: Iterable[Action]) -> None:
        """Update every tile; returns when all state and weights are in place.

        Args:
            update: Its tiles; it is told of each when work is issued that writes the tile's
                weights, and reads its gradient.
            actions: What to do, in order; may be decided while it runs. ``last_plan`` holds it
                afterwards. They call :meth:`follow` where they come from the caller.

        Raises:
            PlanError: The actions do not step every tile once.
            UpdateError: Work on a lane failed or did not end in time.
        """
        begin = time.perf_counter()
        self._on_issued, work = update.issued, update.work
        self._is_sharing = False
        self._in_flight.clear()
        self._flights.clear()
        self._host_steps.clear()
        done, before_norm = [], 0
        self._came_ahead.clear()
        try:
            for action in actions:
                before_norm += update.is_open
                self._issue[action.kind](action.tile, work[action.tile])
                done.append(action)
        except BaseException:
            # What the lanes have been given must not land in state that is loaded afterwards.
            with contextlib.suppress(UpdateError):
                self._device.synchronize()
            raise
        self._device.synchronize()
        self._cache.end_update()
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
        place, lane, home = work.place, self._device.h2d, work.tensors
        if self._weights_sent is not None:  # see [Note: staging]
            lane.wait(self._weights_sent, Wait.WEIGHTS_FIRST)
        held = self._free_slot(tile) if place is None else place
        sources, targets = [home.grad], [held.views(home.numel)[3]]
        if place is None or place.content is Content.NOTHING:
            sources, targets = [*home.state, *sources], [*held.views_like(home.state), *targets]
        lane.submit(f"prefetch of {work.name}", lambda: copy_all(targets, sources))
        held.filled = lane.record()
        if place is None:
            return
        if place.came_ahead:
            self._came_ahead.append(tile)
        if place.stays:
            place.keeps_grad = True
            self._in_flight.append((held.filled, home.numel))

    def _free_slot(self, tile: int) -> Buffers:
        """Return the next slot, into which ``tile`` is fetched; see [Note: slots]."""
        slot, lane = self._upcoming, self._device.h2d
        assert slot is not None, "no slot was allocated"
        self._upcoming = next(self._next_slot)
        self._held[tile] = slot
        if slot.free is not None:
            lane.wait(slot.free, Wait.SLOT_FREE)
        if self._is_sharing:
            slot.begin = lane.stamp()
        return slot

    def _device_step(self, tile: int, work: TileArgs) -> None:
        place, lane, tensors = work.place, self._device.compute, work.tensors
        held = place or self._held.get(tile)
        if held is not None:
            assert held.filled is not None, tile
            lane.wait(held.filled, Wait.PREFETCHED)
            views = held.views(tensors.numel)
            weights = views[4] if self._weights_on_host else tensors.weights
            master, exp_avg, exp_avg_sq = held.views_like(tensors.state)
            tensors = AdamTensors(master, exp_avg, exp_avg_sq, views[3], weights)
        elif self._weights_on_host:  # see [Note: weights on the host]
            held = self._held[tile] = next(self._next_outbox)
            if held.free is not None:
                lane.wait(held.free, Wait.STAGING_FREE)
            tensors = AdamTensors(*tensors.state, tensors.grad, *held.views(tensors.numel))
        lane.submit(
            f"step of {work.name}",
            lambda: self._device.adam(tensors, work.scalars, work.tail_start),
        )
        stepped = lane.record()
        if held is not None:
            held.stepped = stepped
        if place is not None and place.stays:
            place.content = Content.DIRTY
        if not self._weights_on_host:
            self._on_issued(tile, stepped)

    def _state_flush(self, tile: int, work: TileArgs) -> None:
        place, lane = work.place, self._device.d2h
        held = place or self._held.pop(tile)
        assert held.stepped is not None, tile
        lane.wait(held.stepped, Wait.STEPPED)
        views = held.views(work.tensors.numel)
        if self._weights_on_host:
            home, staged = (work.tensors.weights,), views[-1:]
            lane.submit(f"weights of {work.name}", lambda: copy_all(home, staged))
            self._on_issued(tile, lane.record())
        if place is not None and place.stays:
            return
        is_outbox = len(views) == 1
        if not is_outbox:
            self._cache.before_overwrite(tile)
            targets = work.tensors.state
            sources = held.views_like(targets)
            # The last of the lanes that use memory of a tile's own: it is after all others.
            uses = () if place is None else place.tensors
            lane.submit(f"state flush of {work.name}", lambda: copy_all(targets, sources), uses)
        # The split learns the rate of slots: what is sent ahead takes less of the links.
        if self._is_sharing and held.begin is not None and not is_outbox:
            self._flights.append((work.tensors.numel, held.begin, lane.stamp()))
        self._device.release_slot(held.tensors)
        held.free = lane.record()
        if place is not None:
            self._cache.leave(tile, held.free)
        elif not is_outbox:
            self._in_flight.append((held.free, work.tensors.numel))

    def _host_step(self, tile: int, work: TileArgs) -> None:
        assert work.place is None, tile  # or the CPU would step what is out of date
        self._cache.before_overwrite(tile)
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
