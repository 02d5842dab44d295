"""An update of which a part runs during backward, simulated: the engine's plan for an iteration.

Time 0 of the lanes is the begin of the last micro-batch's backward. Backward ends with tiles in the
reverse of their order, at an even pace; each tile's gradients then go to host memory. What the plan
says of the update is told from the moment on at which the norm is known.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from deep_optimizer_states.plan import Action
from deep_optimizer_states.predict.lanes import Job
from deep_optimizer_states.predict.machine import Machine
from deep_optimizer_states.predict.memory.offload import ahead_room_bytes
from deep_optimizer_states.predict.phases import phases_of
from deep_optimizer_states.predict.update_sim import Slot, State, UpdateSimulator
from deep_optimizer_states.predict.workload import STATE_BYTES, Workload, schedule_of
from deep_optimizer_states.schedule import MOST_UNDER_WAY
from deep_optimizer_states.split import TINY, Choose, RunTimeSplit


class Backward:
    """Backward and what it hands over; the ``Arrivals`` of a simulated update.

    Args:
        simulator: Whose tiles they are.
        state: Of the update.
    """

    host_tiles: frozenset[int] = frozenset()

    def __init__(self, simulator: IterationSimulator, state: State) -> None:
        workload, phases = simulator.workload, simulator.phases
        self._simulator = simulator
        self._state = state
        self._lanes = state.lanes
        schedule = schedule_of(workload, simulator.policy)
        self.order = range(len(schedule.tiles))
        self._numels = [tile.numel for tile in schedule.tiles]
        self._resident = schedule.resident_tiles
        self._device = schedule.device_tiles
        self.ahead = state.ahead
        backward_s = (phases.backward_s - phases.flush_s) / workload.accumulation
        self._backward_s = backward_s
        rate = sum(self._numels) / backward_s
        jobs = []
        for tile in reversed(self.order):
            done = Job("backward", f"backward {tile}", self._numels[tile], rate)
            jobs.append((tile, self._flush(tile, self._lanes.submit(done))))
        norm = Job("backward", "norm", phases.flush_s or 1e-12, 1.0)
        self._norm = self._lanes.submit(norm)
        self._coming = deque(jobs) if workload.step_before_norm else deque()
        self._taken: set[int] = set()
        self._has_come = False
        self._next_ahead = iter(self.order)
        self._waiting: int | None = None
        self._ahead_bytes = 0
        self._under_way: list[Job] = []
        self._lanes.before_step = self._send_ahead

    def _flush(self, tile: int, after: Job) -> Job:
        """A tile's gradients go home, unless they are needed on the device alone."""
        if tile in self._resident or tile in self._simulator.kept_for_sure:
            return after
        size = self._simulator.workload.weight_bytes
        return self._simulator.copy_gradient(tile, self._numels[tile], size, self._state, after)

    @property
    def norm_s(self) -> float:
        """When the norm is known."""
        return self._norm.end_s

    @property
    def is_norm_known(self) -> bool:
        """Whether it is."""
        return self._norm.is_done

    def take(self, wait: bool) -> Iterable[int]:
        """Tiles that backward is done with by now, see ``Arrivals``."""
        if self._has_come:
            return ()
        while True:
            found = []
            while self._coming and self._coming[0][1].is_done:
                found.append(self._coming.popleft()[0])
            self._taken.update(found)
            if self._norm.is_done:
                self._has_come = True
                return [*found, *(tile for tile in self.order if tile not in self._taken)]
            if found or not wait:
                return found
            self._lanes.step()

    def _send_ahead(self) -> None:
        """What the engine does in backward's hooks."""
        while not self._norm.is_done and self._simulator.workload.prefetch_memory_bytes:
            self._under_way = [job for job in self._under_way if not job.is_done]
            tile = self._waiting if self._waiting is not None else next(self._next_ahead, None)
            if tile is None or len(self._under_way) >= MOST_UNDER_WAY:
                self._waiting = tile
                return
            self._waiting = None
            numel = self._numels[tile]
            is_worth_it = numel >= TINY * max(self._numels)
            is_candidate = tile in self._device or not self._device
            if tile in self._resident or tile in self._taken or not (is_worth_it and is_candidate):
                continue
            more = (STATE_BYTES + self._simulator.workload.weight_bytes) * numel
            done = self._lanes.now_s / self._backward_s
            if self._ahead_bytes + more > self._simulator.room_bytes(done):
                self._waiting = tile
                return
            self._ahead_bytes += more
            slot = self._state.ahead[tile] = Slot()
            slot.filled = self._simulator.copy_ahead(tile, numel, self._state)
            self._under_way.append(slot.filled)


class IterationSimulator(UpdateSimulator):
    """Runs one rank's update beside its last backward.

    Args:
        workload: What runs; its policy is settled.
        machine: Where.
        policy: Of this package's engine.
    """

    def __init__(self, workload: Workload, machine: Machine, policy: str) -> None:
        super().__init__(workload, machine, policy)
        self.policy = policy
        self.phases = phases_of(workload, machine)
        self._room = ahead_room_bytes(workload, machine, policy)
        self._backward: Backward | None = None
        schedule = schedule_of(workload, policy)
        kept = self._kept_subgroups if not schedule.dynamic else frozenset[int]()
        device = schedule.device_tiles
        tiles = enumerate(schedule.tiles)
        self.kept_for_sure = frozenset(
            idx for idx, tile in tiles if tile.subgroup in kept and idx in device
        )

    def room_bytes(self, share: float) -> float:
        """Device memory for state ahead when a share of backward is done, from 0 to 1."""
        limit, (always, freed) = self.workload.prefetch_memory_bytes, self._room
        room = always + min(1.0, share) * freed
        return min(limit, room) if isinstance(limit, int) else room

    def work(self, state: State, split: RunTimeSplit) -> tuple[list[int], Iterable[Action]]:
        """Elements of each tile, and the actions on them in issue order."""
        schedule = schedule_of(self.workload, self.policy)
        numels = [tile.numel for tile in schedule.tiles]
        kept = self._kept_subgroups
        tiles = enumerate(schedule.tiles)
        self._kept_tiles = frozenset(idx for idx, tile in tiles if tile.subgroup in kept)

        def share(tiles: Sequence[int], sizes: Sequence[int]) -> Choose:
            return split.share(tiles, sizes, state.in_flight)

        self._backward = Backward(self, state)
        return numels, schedule.actions(self._backward, share, state.has_room)

    @property
    def norm_s(self) -> float:
        """When, on the lanes' clock, the gradients' norm is known."""
        assert self._backward is not None
        return self._backward.norm_s

    @property
    def is_norm_known(self) -> bool:
        """Whether it is by now."""
        assert self._backward is not None
        return self._backward.is_norm_known

    def copy_ahead(self, tile: int, numel: int, state: State) -> Job:
        """Queue the way of a tile's state to the device."""
        return self.copy("H2D", f"ahead {tile}", numel, STATE_BYTES, state)

    def copy_gradient(self, tile: int, numel: int, size: int, state: State, after: Job) -> Job:
        """Queue the way of a tile's gradients to host memory."""
        return self.copy("grads", f"gradient {tile}", numel, size, state, after)

    def prefetch(self, tile: int, numel: int, state: State) -> None:
        """The same; of a tile that is ahead the gradient alone."""
        slot = state.ahead.get(tile)
        if slot is None:
            super().prefetch(tile, numel, state)
            return
        state.held[tile] = slot
        num_bytes = self.prefetched_bytes(tile) - STATE_BYTES
        if num_bytes:
            slot.filled = self.copy("H2D", f"gradient {tile}", numel, num_bytes, state, slot.filled)
