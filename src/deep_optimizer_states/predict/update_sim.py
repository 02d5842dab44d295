"""The update phase, simulated: the very plan that the executor runs, on lanes that share resources.

[Note: one slot] The paper's engine has one device slot: the next prefetch begins after the last
flush. Its host thread waits for the prefetch, copies the fp32 gradient to the device and only then
goes on. Published update times by stride are reproduced by this order and by no freer one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from deep_optimizer_states.plan import DEVICE_CHAIN, HOST_CHAIN, RESIDENT_CHAIN, Action, Kind, Plan
from deep_optimizer_states.predict.lanes import Job, Lanes
from deep_optimizer_states.predict.machine import Machine
from deep_optimizer_states.predict.memory_need import SLOTS, STAGING_BUFFERS, kept_subgroups
from deep_optimizer_states.predict.rank import STATE_BYTES, Rank, rank_of
from deep_optimizer_states.predict.workload import Workload, resident_subgroups, schedule_of
from deep_optimizer_states.schedule import NUM_AHEAD
from deep_optimizer_states.split import Chains, Flight, HostStep, RunTimeSplit

PAPER_SLOTS = 1
LEARNING_UPDATES = 4
"""Updates after which the dynamic split knows its lanes."""
FP32_BYTES = 4
STATE_COPIES = 3
"""Of a tile's master weights and moments; its gradient is one more."""
WAIT_AND_RECORD = 2
"""Entries of a stream's queue beside a tile's copies, or its kernel."""
LANES = ("CPU", "H2D", "GPU", "D2H", "weights")
_LINKS = {"H2D": "h2d", "weights": "h2d", "D2H": "d2h"}


@dataclass(frozen=True)
class UpdateRun:
    """What a simulated update did.

    Attributes:
        seconds: From its start until all state and weights are in place.
        plan: What ran where, in issue order.
        jobs: Everything the lanes did, in the order it ended.
        ready_s: When each tile's 16-bit weights were on the device.
    """

    seconds: float
    plan: Plan
    jobs: list[Job]
    ready_s: Mapping[int, float]

    def busy_s(self, lane: str) -> float:
        """Time a lane worked."""
        return sum(job.end_s - job.begin_s for job in self.jobs if job.lane == lane)


@dataclass
class _Slot:
    free: Job | None = None
    filled: Job | None = None
    stepped: Job | None = None


@dataclass
class _State:
    lanes: Lanes
    upcoming: list[_Slot]
    staging: itertools.cycle[_Slot]
    held: dict[int, _Slot] = field(default_factory=dict)
    ready: dict[int, Job] = field(default_factory=dict)
    flights: list[tuple[Job, Job]] = field(default_factory=list)
    landed: int = 0
    host_steps: list[tuple[float, Job]] = field(default_factory=list)

    def in_flight(self) -> int:
        while self.landed < len(self.flights) and self.flights[self.landed][1].is_done:
            self.landed += 1
        return int(sum(flush.work for _, flush in self.flights[self.landed :]))

    def has_room(self, wait: bool) -> bool:
        """Whether the device may be given one more tile, as the executor decides it."""
        while self.in_flight() and len(self.flights) - self.landed >= NUM_AHEAD:
            if not wait:
                return False
            self.lanes.run_until(self.flights[self.landed][1])
        return True

    def teach(self, split: RunTimeSplit) -> None:
        """Tell the split what this update did."""
        steps = [HostStep(int(j.work), wait, j.end_s - j.begin_s) for wait, j in self.host_steps]
        flights = [Flight(int(end.work), begin.begin_s, end.end_s) for begin, end in self.flights]
        split.learn(steps, flights, self.lanes.now_s)


class UpdateSimulator:
    """Runs one rank's update; every rank of a node is taken to do the same at the same time.

    Args:
        workload: What runs.
        machine: Where.
    """

    def __init__(self, workload: Workload, machine: Machine) -> None:
        self._workload = workload
        self._machine = machine
        self._rank = rank_of(workload, machine)
        self._is_ours = workload.engine == "ours"
        self._weight_bytes = workload.weight_bytes
        self._kept_tiles: frozenset[int] = frozenset()

    def run(self, policy: str) -> UpdateRun:
        """Simulate.

        Args:
            policy: For this package's engine; the others have their own.
        """
        if self._is_ours:
            kept = kept_subgroups(self._workload, self._machine, policy)
            tiles = enumerate(schedule_of(self._workload, policy).tiles)
            self._kept_tiles = frozenset(idx for idx, tile in tiles if tile.subgroup in kept)
        split = RunTimeSplit()
        for _ in range(LEARNING_UPDATES if self._is_ours and policy == "dynamic" else 0):
            self._run(policy, split)
        return self._run(policy, split)

    def _run(self, policy: str, split: RunTimeSplit) -> UpdateRun:
        slots = SLOTS if self._is_ours else PAPER_SLOTS
        lanes = Lanes(lambda resource, active: _capacity(self._rank, resource, active))
        staging = itertools.cycle([_Slot() for _ in range(STAGING_BUFFERS)])
        state = _State(lanes, [_Slot() for _ in range(slots)], staging)
        numels, actions = self._work(policy, state, split)
        done = []
        for action in actions:
            self._issue(action, numels[action.tile], state)
            done.append(action)
        for job in (job for job in state.ready.values() if job.lane == "GPU"):
            lanes.run_until(job)
        stepped_s = lanes.now_s
        lanes.run_until(None)
        state.teach(split)
        # The paper's engine does not wait for its last copies (and may lose them).
        seconds = stepped_s if self._workload.engine == "paper" else lanes.now_s
        ready = {tile: job.end_s for tile, job in state.ready.items()}
        return UpdateRun(seconds, Plan(len(numels), tuple(done)), lanes.done, ready)

    def _work(
        self, policy: str, state: _State, split: RunTimeSplit
    ) -> tuple[list[int], Iterable[Action]]:
        work = self._workload
        if not self._is_ours:
            return list(work.subgroups), paper_actions(work)
        schedule = schedule_of(work, policy)
        numels = [tile.numel for tile in schedule.tiles]

        def share(tiles: Sequence[int], sizes: Sequence[int]) -> Chains:
            return split.share(tiles, sizes, state.in_flight)

        has_room = (lambda wait: True) if work.issues_all_first else state.has_room
        return numels, schedule.actions(frozenset(), share, has_room)

    def _issue(self, action: Action, numel: int, state: _State) -> None:
        handlers = {
            Kind.PREFETCH: self._prefetch,
            Kind.DEVICE_STEP: self._device_step,
            Kind.STATE_FLUSH: self._state_flush,
            Kind.HOST_STEP: self._host_step,
            Kind.WEIGHTS: self._weights,
        }
        handlers[action.kind](action.tile, numel, state)

    def _prefetch(self, tile: int, numel: int, state: _State) -> None:
        slot = state.upcoming.pop(0)
        state.upcoming.append(slot)
        state.held[tile] = slot
        fetches_grad = self._is_ours and tile not in self._kept_tiles
        num_bytes = STATE_BYTES + (self._weight_bytes if fetches_grad else 0)
        slot.filled = self._copy("H2D", f"prefetch {tile}", numel, num_bytes, state, slot.free)

    def _device_step(self, tile: int, numel: int, state: _State) -> None:
        slot = state.held.get(tile)
        filled = slot.filled if slot else None
        if not self._is_ours and slot is not None:  # see [Note: one slot]
            assert filled is not None, tile
            state.lanes.run_until(filled)
            gradient = self._blocking(f"gradient {tile}", numel, self._rank.h2d_bytes_per_s, state)
            state.lanes.run_until(gradient)
        job = Job("GPU", f"step {tile}", numel, self._rank.device_parameters_per_s)
        job.after = (filled,) if filled else ()
        job.entries = 1 + WAIT_AND_RECORD
        state.ready[tile] = state.lanes.submit(job)
        if slot is not None:
            slot.stepped = job

    def _state_flush(self, tile: int, numel: int, state: _State) -> None:
        slot = state.held.pop(tile)
        slot.free = self._copy("D2H", f"flush {tile}", numel, STATE_BYTES, state, slot.stepped)
        assert slot.filled is not None, tile
        state.flights.append((slot.filled, slot.free))

    def _host_step(self, tile: int, numel: int, state: _State) -> None:
        staging = next(state.staging)
        state.held[tile] = staging
        began_s = state.lanes.now_s
        if staging.free is not None:
            state.lanes.run_until(staging.free)
        stalled_s = state.lanes.now_s - began_s
        draws = {"host": float(self._rank.host_bytes)}
        job = Job("CPU", f"step {tile}", numel, self._rank.host_parameters_per_s, draws)
        state.host_steps.append((stalled_s, job))
        state.lanes.run_until(state.lanes.submit(job))

    def _weights(self, tile: int, numel: int, state: _State) -> None:
        staging = state.held.pop(tile)
        if self._workload.engine in ("zero3-0.13", "async-0.13", "zero3"):
            # Stock sends fp32 master weights and waits; the device rounds them.
            alone = self._rank.blocking_bytes_per_s
            job = self._blocking(f"weights {tile}", numel, alone, state)
            state.lanes.run_until(job)
        else:
            job = self._copy("weights", f"weights {tile}", numel, self._weight_bytes, state)
        staging.free = state.ready[tile] = job

    def _copy(
        self,
        lane: str,
        what: str,
        numel: int,
        num_bytes: int,
        state: _State,
        after: Job | None = None,
    ) -> Job:
        """Queue a copy of ``num_bytes`` a parameter."""
        link = _LINKS[lane]
        rate = getattr(self._rank, f"{link}_bytes_per_s") / num_bytes
        draws = {link: float(num_bytes), "host": float(num_bytes)}
        job = Job(lane, what, numel, rate, draws, (after,) if after else ())
        copies = 1 if lane == "weights" else STATE_COPIES + (num_bytes > STATE_BYTES)
        job.entries = copies + WAIT_AND_RECORD
        return state.lanes.submit(job)

    def _blocking(self, what: str, numel: int, bytes_per_s: float, state: _State) -> Job:
        """Queue a copy of fp32 values that the host's thread makes itself."""
        draws = {"host": float(FP32_BYTES)}
        return state.lanes.submit(Job("CPU", what, numel, bytes_per_s / FP32_BYTES, draws))


def _capacity(rank: Rank, resource: str, active: Iterable[Job]) -> float:
    if resource == "host":
        return rank.host_bytes_per_s
    busy = {_LINKS.get(job.lane) for job in active}
    both = {"h2d", "d2h"} <= busy
    return float(getattr(rank, f"{resource}{'_both' if both else ''}_bytes_per_s"))


def paper_actions(workload: Workload) -> list[Action]:
    """The update of DeepSpeed's own engines and of the paper's, in the order they issue it."""
    resident = resident_subgroups(workload)
    rest = [idx for idx in range(len(workload.subgroups)) if idx not in resident]
    moved = [idx for idx in rest if workload.engine == "paper" and (idx + 1) % workload.stride == 0]
    upcoming = iter(moved)
    actions = []

    def prefetch_next() -> None:
        tile = next(upcoming, None)
        if tile is not None:
            actions.append(Action(tile, Kind.PREFETCH))

    prefetch_next()
    for idx in rest:
        if idx in moved:
            actions += [Action(idx, kind) for kind in DEVICE_CHAIN[1:]]
            prefetch_next()
        else:
            actions += [Action(idx, kind) for kind in HOST_CHAIN]
    for idx in sorted(resident):
        actions += [Action(idx, kind) for kind in RESIDENT_CHAIN]
    return actions


def simulate_update(workload: Workload, machine: Machine, policy: str = "all-host") -> UpdateRun:
    """Simulate one rank's update phase.

    Args:
        workload: What runs.
        machine: Where.
        policy: For this package's engine: ``all-host``, ``ratio``, ``stride``, ``all-device`` or
            ``dynamic``.

    Raises:
        MachineError: A rate that is needed was not measured.
    """
    return UpdateSimulator(workload, machine).run(policy)
