"""The update phase, simulated: the very plan that the executor runs, on lanes that share resources.

Software that updates otherwise has a subclass of :class:`UpdateSimulator`, which overrides what its
actions do.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from deep_optimizer_states.plan import Action, Kind, Plan
from deep_optimizer_states.predict.lanes import Job, Lanes, UpdateRun
from deep_optimizer_states.predict.machine import Machine
from deep_optimizer_states.predict.memory.arrays import SLOTS, STAGING_BUFFERS
from deep_optimizer_states.predict.memory.offload import kept_subgroups
from deep_optimizer_states.predict.rank import Rank, rank_of
from deep_optimizer_states.predict.workload import FP32_BYTES, STATE_BYTES, Workload, schedule_of
from deep_optimizer_states.schedule import NUM_AHEAD, AllAtOnce
from deep_optimizer_states.split import Choose, Flight, HostStep, RunTimeSplit

LEARNING_UPDATES = 4
"""Updates after which the dynamic split knows its lanes."""
STATE_COPIES = 3
"""Of a tile's master weights and moments; its gradient is one more."""
WAIT_AND_RECORD = 2
"""Entries of a stream's queue beside a tile's copies, or its kernel."""
LANES = ("CPU", "H2D", "GPU", "D2H", "weights")
_LINKS = {"H2D": "h2d", "weights": "h2d", "D2H": "d2h", "grads": "d2h"}
_RESOURCES = {
    "CPU": "host Adam",
    "H2D": "link to the GPU",
    "GPU": "device Adam",
    "D2H": "link from the GPU",
    "weights": "link to the GPU",
    "grads": "link from the GPU",
}
"""What each lane is called where it binds an update."""
_BLOCKING = "blocking copy"
_ROUNDING = 1e-9
"""Host memory binds only if it takes longer than the one lane that uses it, by more than this."""


@dataclass
class Slot:
    """A slot on the device or a staging buffer on the host, by the jobs that use it."""

    free: Job | None = None
    filled: Job | None = None


@dataclass
class State:
    """One simulated update under way.

    Attributes:
        lanes: The clock and the lanes.
        upcoming: Device slots, the one to be used next first.
        staging: Staging buffers, in turn.
        held: The slot or buffer that a tile is in.
        ahead: Memory of its own of each tile whose state was sent ahead of the update.
        ready: The job after which a tile's 16-bit weights are where they live.
        flights: First and last job of each tile that passed through the device.
        landed: How many of those are known to be over.
        host_steps: What the CPU lane waited before each of its steps, in s, and the step.
        device_steps: The device's.
    """

    lanes: Lanes
    upcoming: list[Slot]
    staging: itertools.cycle[Slot]
    held: dict[int, Slot] = field(default_factory=dict)
    ahead: dict[int, Slot] = field(default_factory=dict)
    ready: dict[int, Job] = field(default_factory=dict)
    flights: list[tuple[Job, Job]] = field(default_factory=list)
    landed: int = 0
    host_steps: list[tuple[float, Job]] = field(default_factory=list)
    device_steps: list[Job] = field(default_factory=list)

    def in_flight(self) -> int:
        """Elements that are on their way through the device."""
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
        policy: Of this package's engine.
    """

    slots = SLOTS
    """Tiles that the device holds at once."""
    waits_for_flushes = True
    """Whether the update ends with the last flush, or with the device's last step."""

    def __init__(self, workload: Workload, machine: Machine, policy: str) -> None:
        self.workload = workload
        self.rank = rank_of(workload, machine)
        self._policy = policy
        self._kept_subgroups = kept_subgroups(workload, machine, policy)
        self._kept_tiles: frozenset[int] = frozenset()

    def run(self) -> UpdateRun:
        """Simulate; a dynamic split learns from updates before the one that is returned."""
        split = RunTimeSplit()
        for _ in range(LEARNING_UPDATES if self._policy == "dynamic" else 0):
            self._run(split)
        return self._run(split)

    def _run(self, split: RunTimeSplit) -> UpdateRun:
        lanes = Lanes(lambda resource, active: _capacity(self.rank, resource, active))
        staging = itertools.cycle([Slot() for _ in range(STAGING_BUFFERS)])
        state = State(lanes, [Slot() for _ in range(self.slots)], staging)
        numels, actions = self.work(state, split)
        done, before_norm = [], 0
        for action in actions:
            before_norm += not self.is_norm_known
            self._issue(action, numels[action.tile], state)
            done.append(action)
        for job in state.device_steps:
            lanes.run_until(job)
        stepped_s = lanes.now_s
        lanes.run_until(None)
        state.teach(split)
        seconds = lanes.now_s if self.waits_for_flushes else stepped_s
        sent = [Action(tile, Kind.AHEAD) for tile in state.ahead]
        plan = Plan(len(numels), (*sent, *done), len(sent) + before_norm)
        jobs = [job for job in lanes.done if job.lane in _RESOURCES]
        for job in jobs:
            job.submit_s -= self.norm_s
            job.begin_s -= self.norm_s
            job.end_s -= self.norm_s
        ready = {tile: max(0.0, job.end_s) for tile, job in state.ready.items()}
        return UpdateRun(max(0.0, seconds - self.norm_s), plan, jobs, ready, self._binding(jobs))

    @property
    def norm_s(self) -> float:
        """When, on the lanes' clock, the gradients' norm is known."""
        return 0.0

    @property
    def is_norm_known(self) -> bool:
        """Whether it is by now."""
        return True

    def _binding(self, jobs: Iterable[Job]) -> str:
        """Add up what each resource needs for its own work, and name the one that needs most."""
        seconds: defaultdict[str, float] = defaultdict(float)
        blocked_s = 0.0
        for job in jobs:
            memory_s = job.work * job.draws.get("host", 0.0) / self.rank.host_bytes_per_s
            alone_s = max(job.work / job.top_rate, memory_s)
            seconds[_RESOURCES[job.lane]] += alone_s
            seconds["host memory"] += (1 - _ROUNDING) * memory_s
            blocked_s += alone_s if job.what.startswith(_BLOCKING) else 0.0
        longest = max(seconds, key=lambda name: seconds[name])
        if longest == "host Adam" and blocked_s > seconds[longest] / 2:
            return "copies to the GPU"
        is_both_ways = longest.startswith("link") and seconds["link from the GPU"] > 0
        return "link to and from the GPU" if is_both_ways else longest

    def work(self, state: State, split: RunTimeSplit) -> tuple[list[int], Iterable[Action]]:
        """Elements of each tile, and the actions on them in issue order."""
        schedule = schedule_of(self.workload, self._policy)
        numels = [tile.numel for tile in schedule.tiles]
        kept = self._kept_subgroups
        tiles = enumerate(schedule.tiles)
        self._kept_tiles = frozenset(idx for idx, tile in tiles if tile.subgroup in kept)

        def share(tiles: Sequence[int], sizes: Sequence[int]) -> Choose:
            return split.share(tiles, sizes, state.in_flight)

        has_room = (lambda wait: True) if self.workload.issues_all_first else state.has_room
        return numels, schedule.actions(AllAtOnce(range(len(numels))), share, has_room)

    def _issue(self, action: Action, numel: int, state: State) -> None:
        handlers = {
            Kind.PREFETCH: self.prefetch,
            Kind.DEVICE_STEP: self.device_step,
            Kind.STATE_FLUSH: self._state_flush,
            Kind.HOST_STEP: self._host_step,
            Kind.WEIGHTS: self.weights,
        }
        handlers[action.kind](action.tile, numel, state)

    def prefetched_bytes(self, tile: int) -> int:
        """Bytes of each element of a tile that are copied into its slot."""
        return STATE_BYTES + (0 if tile in self._kept_tiles else self.workload.weight_bytes)

    def prefetch(self, tile: int, numel: int, state: State) -> None:
        """Queue the copy of a tile's state and gradient into a slot."""
        slot = state.upcoming.pop(0)
        state.upcoming.append(slot)
        state.held[tile] = slot
        num_bytes = self.prefetched_bytes(tile)
        slot.filled = self.copy("H2D", f"prefetch {tile}", numel, num_bytes, state, slot.free)

    def device_step(self, tile: int, numel: int, state: State) -> None:
        """Queue the device's Adam, behind the prefetch of a tile that is not resident."""
        slot = state.held.get(tile)
        filled = slot.filled if slot else None
        job = Job("GPU", f"step {tile}", numel, self.rank.device_parameters_per_s)
        job.after = (filled,) if filled else ()
        job.entries = 1 + WAIT_AND_RECORD
        state.ready[tile] = state.lanes.submit(job)
        state.device_steps.append(job)

    def _state_flush(self, tile: int, numel: int, state: State) -> None:
        slot = state.held.pop(tile, None)
        stepped = state.ready[tile]
        if self.workload.weights_on_host:
            size = self.workload.weight_bytes
            stepped = self.copy("D2H", f"weights {tile}", numel, size, state, stepped)
            state.ready[tile] = stepped
        if slot is not None:  # a resident tile sends its weights alone
            slot.free = self.copy("D2H", f"flush {tile}", numel, STATE_BYTES, state, stepped)
            if tile in state.ahead:
                return
            assert slot.filled is not None, tile
            state.flights.append((slot.filled, slot.free))

    def _host_step(self, tile: int, numel: int, state: State) -> None:
        began_s = state.lanes.now_s
        if not self.workload.weights_on_host:
            staging = state.held[tile] = next(state.staging)
            if staging.free is not None:
                state.lanes.run_until(staging.free)
        stalled_s = state.lanes.now_s - began_s
        draws = {"host": float(self.rank.host_bytes)}
        job = Job("CPU", f"step {tile}", numel, self.rank.host_parameters_per_s, draws)
        state.host_steps.append((stalled_s, job))
        state.lanes.run_until(state.lanes.submit(job))
        if self.workload.weights_on_host:
            state.ready[tile] = job

    def weights(self, tile: int, numel: int, state: State) -> None:
        """Queue the copy of a tile's 16-bit weights to the device."""
        num_bytes = self.workload.weight_bytes
        job = self.copy("weights", f"weights {tile}", numel, num_bytes, state)
        state.held.pop(tile).free = state.ready[tile] = job

    def block(self, what: str, numel: int, bytes_per_s: float, state: State) -> Job:
        """Let the CPU lane itself copy fp32 values, and wait until it has."""
        draws = {"host": float(FP32_BYTES)}
        what = f"{_BLOCKING} of {what}"
        job = state.lanes.submit(Job("CPU", what, numel, bytes_per_s / FP32_BYTES, draws))
        state.lanes.run_until(job)
        return job

    def copy(
        self,
        lane: str,
        what: str,
        numel: int,
        num_bytes: int,
        state: State,
        after: Job | None = None,
    ) -> Job:
        """Queue a copy of ``num_bytes`` a parameter."""
        link = _LINKS[lane]
        rate = getattr(self.rank, f"{link}_bytes_per_s") / num_bytes
        draws = {link: float(num_bytes), "host": float(num_bytes)}
        job = Job(lane, what, numel, rate, draws, (after,) if after else ())
        copies = 1 if num_bytes < STATE_BYTES else STATE_COPIES + (num_bytes > STATE_BYTES)
        # Gradients come one by one while backward runs: their queue is never full.
        job.entries = copies + WAIT_AND_RECORD if lane != "grads" else 0
        return state.lanes.submit(job)


def _capacity(rank: Rank, resource: str, active: Iterable[Job]) -> float:
    if resource == "host":
        return rank.host_bytes_per_s
    busy = {_LINKS.get(job.lane) for job in active}
    both = {"h2d", "d2h"} <= busy
    return float(getattr(rank, f"{resource}{'_both' if both else ''}_bytes_per_s"))


def simulate_update(workload: Workload, machine: Machine, policy: str = "all-host") -> UpdateRun:
    """Simulate one rank's update phase.

    Args:
        workload: What runs.
        machine: Where.
        policy: For this package's engine: ``all-host``, ``ratio``, ``stride``, ``all-device`` or
            ``dynamic``; other software has its own way.

    Raises:
        MachineError: A rate that is needed was not measured.
    """
    if workload.software is not None:
        return workload.software.simulator(workload, machine, policy).run()
    if workload.works_in_backward and machine.gpus:
        from deep_optimizer_states.predict.iteration_sim import IterationSimulator

        return IterationSimulator(workload, machine, policy).run()
    return UpdateSimulator(workload, machine, policy).run()
