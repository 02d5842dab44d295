"""The update phase, simulated: the plan that the executor runs, on lanes that share resources."""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from deep_optimizer_states.core.plan import (
    DEVICE_CHAIN,
    HOST_CHAIN,
    RESIDENT_CHAIN,
    WITH_WEIGHTS_ON_HOST,
    Action,
    Kind,
    Plan,
)
from deep_optimizer_states.core.policies import Choose, Flight, HostStep, RunTimeSplit
from deep_optimizer_states.core.schedule import NUM_AHEAD, AllAtOnce
from deep_optimizer_states.predict.machine import Machine
from deep_optimizer_states.predict.memory.arrays import SLOTS, STAGING_BUFFERS
from deep_optimizer_states.predict.memory.offload import kept_subgroups
from deep_optimizer_states.predict.rank import Rank, rank_of
from deep_optimizer_states.predict.simulator import Job, Simulator
from deep_optimizer_states.predict.workload import (
    FP32_BYTES,
    STATE_BYTES,
    StockOffload,
    Workload,
    schedule_of,
)

LEARNING_UPDATES = 4
"""Updates after which the dynamic split knows its lanes."""
LANES = {
    "CPU": "host Adam",
    "H2D": "link to the GPU",
    "GPU": "device Adam",
    "D2H": "link from the GPU",
    "weights": "link to the GPU",
}
"""The lanes of an update, and what each is called where it binds one."""
_LINKS = {"H2D": "h2d", "weights": "h2d", "D2H": "d2h"}
_BLOCKING = "blocking copy"
_ROUNDING = 1e-9
"""Host memory binds only if it takes longer than the one lane that uses it, by more than this."""


@dataclass(frozen=True)
class UpdateRun:
    """What a simulated update did."""

    seconds: float  # from its start until all state and weights are in place
    plan: Plan  # what ran where, in issue order
    jobs: list[Job]  # what the lanes did, in the order in which it ended
    ready_s: Mapping[int, float]  # until a tile's 16-bit weights were where they live
    binding: str  # the resource that has most to do, which the update lasts at least as long as


def simulate_update(workload: Workload, machine: Machine, policy: str = "all-host") -> UpdateRun:
    """Simulate one rank's update phase; every rank of a node does the same at the same time.

    Args:
        workload: What runs.
        machine: Where it runs.
        policy: For this package's engine; other software has its own way.

    Raises:
        MachineError: A rate that is needed was not measured.
    """
    if workload.software is not None:
        return _StockUpdate(workload, machine, workload.software).run()
    split = RunTimeSplit()
    for _ in range(LEARNING_UPDATES if policy == "dynamic" else 0):
        _OwnUpdate(workload, machine, policy, split).run()
    return _OwnUpdate(workload, machine, policy, split).run()


@dataclass
class _Slot:
    """A slot on the device or a staging buffer on the host, by the jobs that use it."""

    free: Job | None = None
    filled: Job | None = None


class _Update:
    """One rank's update under way."""

    def __init__(self, workload: Workload, machine: Machine, num_slots: int) -> None:
        self.workload = workload
        self.rank = rank_of(workload, machine)
        self.simulator = Simulator(lambda resource, in_use: _capacity(self.rank, resource, in_use))
        self.slots = deque(_Slot() for _ in range(num_slots))
        self.staging = itertools.cycle([_Slot() for _ in range(STAGING_BUFFERS)])
        self.held: dict[int, _Slot] = {}
        self.ready: dict[int, Job] = {}

    def issue(self, action: Action, numel: int) -> None:
        """Submit the jobs of an action; the host thread waits for its own."""
        handlers = {
            Kind.PREFETCH: self.prefetch,
            Kind.DEVICE_STEP: self.device_step,
            Kind.STATE_FLUSH: self.state_flush,
            Kind.HOST_STEP: self.host_step,
            Kind.WEIGHTS: self.weights,
        }
        handlers[action.kind](action.tile, numel)

    def result(self, seconds: float, plan: Plan) -> UpdateRun:
        ready_s = {tile: job.end_s for tile, job in self.ready.items()}
        jobs = self.simulator.done
        return UpdateRun(seconds, plan, jobs, ready_s, _binding(jobs, self.rank))

    def prefetch(self, tile: int, numel: int, num_bytes: int = STATE_BYTES) -> None:
        """Queue a copy of ``num_bytes`` a parameter into the next slot."""
        slot = self.held[tile] = self.slots.popleft()
        self.slots.append(slot)
        slot.filled = self.copy("H2D", f"prefetch {tile}", numel, num_bytes, slot.free)

    def device_step(self, tile: int, numel: int) -> None:
        """Queue the device's Adam, behind the prefetch of a tile that is not resident."""
        slot = self.held.get(tile)
        after = (slot.filled,) if slot and slot.filled else ()
        job = Job("GPU", f"step {tile}", numel, self.rank.device_parameters_per_s, after=after)
        self.ready[tile] = self.simulator.submit(job)

    def state_flush(self, tile: int, numel: int) -> None:
        stepped, slot = self.ready[tile], self.held.pop(tile, None)
        if self.workload.weights_on_host:
            size = self.workload.weight_bytes
            stepped = self.ready[tile] = self.copy("D2H", f"weights {tile}", numel, size, stepped)
        if slot is not None:  # a resident tile sends its weights alone
            slot.free = self.copy("D2H", f"flush {tile}", numel, STATE_BYTES, stepped)

    def host_step(self, tile: int, numel: int) -> Job:
        if not self.workload.weights_on_host:
            staging = self.held[tile] = next(self.staging)
            if staging.free is not None:
                self.simulator.run_until(staging.free)
        draws = {"host": float(self.rank.host_bytes)}
        rate = self.rank.host_parameters_per_s
        job = self.simulator.submit(Job("CPU", f"step {tile}", numel, rate, draws))
        self.simulator.run_until(job)
        if self.workload.weights_on_host:
            self.ready[tile] = job
        return job

    def weights(self, tile: int, numel: int) -> None:
        """Queue the copy of a tile's 16-bit weights to the device."""
        job = self.copy("weights", f"weights {tile}", numel, self.workload.weight_bytes)
        self.held.pop(tile).free = self.ready[tile] = job

    def copy(
        self, lane: str, what: str, numel: int, num_bytes: int, after: Job | None = None
    ) -> Job:
        """Queue a copy of ``num_bytes`` a parameter."""
        link = _LINKS[lane]
        rate = _capacity(self.rank, link, {link}) / num_bytes
        draws = {link: float(num_bytes), "host": float(num_bytes)}
        return self.simulator.submit(Job(lane, what, numel, rate, draws, (after,) if after else ()))


class _OwnUpdate(_Update):
    """An update of this package's engine, which teaches the dynamic split when it is over."""

    def __init__(
        self, workload: Workload, machine: Machine, policy: str, split: RunTimeSplit
    ) -> None:
        super().__init__(workload, machine, SLOTS)
        self.schedule = schedule_of(workload, policy)
        self.split = split
        self.kept = self.schedule.tiles_of_subgroups(kept_subgroups(workload, machine, policy))
        self._flights: list[tuple[Job, Job]] = []
        self._landed = 0
        self._host_steps: list[tuple[float, Job]] = []

    def run(self) -> UpdateRun:
        numels = [tile.numel for tile in self.schedule.tiles]
        issued = []
        arrivals = AllAtOnce(range(len(numels)))
        for action in self.schedule.actions(arrivals, self._share, self._has_room):
            self.issue(action, numels[action.tile])
            issued.append(action)
        self.simulator.run_until()
        self._teach()
        return self.result(self.simulator.now_s, Plan(len(numels), tuple(issued)))

    def _share(self, tiles: Sequence[int], numels: Sequence[int]) -> Choose:
        return self.split.share(tiles, numels, self._in_flight_numel)

    def _in_flight(self) -> list[tuple[Job, Job]]:
        while self._landed < len(self._flights) and self._flights[self._landed][1].is_done:
            self._landed += 1
        return self._flights[self._landed :]

    def _in_flight_numel(self) -> int:
        return int(sum(flush.work for _, flush in self._in_flight()))

    def _has_room(self, wait: bool) -> bool:
        """Decide as the executor does whether the device may be given one more tile."""
        while len(found := self._in_flight()) >= NUM_AHEAD:
            if not wait:
                return False
            self.simulator.run_until(found[0][1])
        return True

    def _teach(self) -> None:
        steps = [HostStep(int(j.work), wait, j.end_s - j.begin_s) for wait, j in self._host_steps]
        flights = [Flight(int(end.work), begin.begin_s, end.end_s) for begin, end in self._flights]
        self.split.learn(steps, flights, self.simulator.now_s)

    def prefetch(self, tile: int, numel: int, num_bytes: int = STATE_BYTES) -> None:
        gradient = 0 if tile in self.kept else self.workload.weight_bytes
        super().prefetch(tile, numel, num_bytes + gradient)

    def state_flush(self, tile: int, numel: int) -> None:
        slot = self.held.get(tile)
        super().state_flush(tile, numel)
        if slot is not None:
            assert slot.filled is not None, tile
            assert slot.free is not None, tile
            self._flights.append((slot.filled, slot.free))

    def host_step(self, tile: int, numel: int) -> Job:
        issued_s = self.simulator.now_s
        job = super().host_step(tile, numel)
        self._host_steps.append((job.begin_s - issued_s, job))
        return job


class _StockUpdate(_Update):
    """An update of other software: subgroup after subgroup, not cut into tiles."""

    def __init__(self, workload: Workload, machine: Machine, software: StockOffload) -> None:
        super().__init__(workload, machine, software.slots)
        self.software = software

    def run(self) -> UpdateRun:
        numels = self.workload.subgroups
        actions = tuple(_stock_actions(self.workload, self.software))
        for action in actions:
            self.issue(action, numels[action.tile])
        for job in self.ready.values():
            if job.lane == "GPU":
                self.simulator.run_until(job)
        stepped_s = self.simulator.now_s
        self.simulator.run_until()
        seconds = stepped_s if self.software.slots else self.simulator.now_s
        return self.result(seconds, Plan(len(numels), actions))

    def device_step(self, tile: int, numel: int) -> None:
        """Copy the fp32 gradient of a tile that is not resident, then step it."""
        slot = self.held.get(tile)
        if slot is not None:
            self.simulator.run_until(slot.filled)
            self._block(f"gradient {tile}", numel, self.rank.h2d_bytes_per_s)
        super().device_step(tile, numel)

    def weights(self, tile: int, numel: int) -> None:
        if self.software.slots:
            super().weights(tile, numel)
            return
        job = self._block(f"weights {tile}", numel, self.rank.blocking_bytes_per_s)
        self.held.pop(tile).free = self.ready[tile] = job

    def _block(self, what: str, numel: int, bytes_per_s: float) -> Job:
        """Let the CPU lane itself copy fp32 values, and wait until it has."""
        draws = {"host": float(FP32_BYTES)}
        what = f"{_BLOCKING} of {what}"
        job = self.simulator.submit(Job("CPU", what, numel, bytes_per_s / FP32_BYTES, draws))
        self.simulator.run_until(job)
        return job


def _stock_actions(workload: Workload, software: StockOffload) -> Iterator[Action]:
    """Yield the actions on subgroups in issue order: those of resident ones come last.

    A subgroup that passes through a slot is prefetched when the one before it has been stepped.
    """
    resident = software.resident_subgroups(workload)
    rest = [idx for idx in range(len(workload.subgroups)) if idx not in resident]
    passing = [idx for idx in rest if software.slots and (idx + 1) % workload.stride == 0]
    following = dict(itertools.pairwise(passing))
    named = WITH_WEIGHTS_ON_HOST if workload.weights_on_host else {}
    for idx in passing[:1]:
        yield Action(idx, Kind.PREFETCH)
    for idx in rest:
        chain = DEVICE_CHAIN[1:] if idx in passing else named.get(HOST_CHAIN, HOST_CHAIN)
        yield from (Action(idx, kind) for kind in chain)
        if idx in following:
            yield Action(following[idx], Kind.PREFETCH)
    for idx in sorted(resident):
        yield from (Action(idx, kind) for kind in named.get(RESIDENT_CHAIN, RESIDENT_CHAIN))


def _capacity(rank: Rank, resource: str, in_use: set[str]) -> float:
    if resource == "host":
        return rank.host_bytes_per_s
    both = "_both" if {"h2d", "d2h"} <= in_use else ""
    return float(getattr(rank, f"{resource}{both}_bytes_per_s"))


def _binding(jobs: Iterable[Job], rank: Rank) -> str:
    """Add up what each resource needs for its own work, and name the one that needs most."""
    seconds: defaultdict[str, float] = defaultdict(float)
    blocked_s = 0.0
    for job in jobs:
        memory_s = job.work * job.draws.get("host", 0.0) / rank.host_bytes_per_s
        alone_s = max(job.work / job.top_rate, memory_s)
        seconds[LANES[job.lane]] += alone_s
        seconds["host memory"] += (1 - _ROUNDING) * memory_s
        blocked_s += alone_s if job.what.startswith(_BLOCKING) else 0.0
    longest = max(seconds, key=lambda name: seconds[name])
    if longest == "host Adam" and blocked_s > seconds[longest] / 2:
        return "copies to the GPU"
    is_both_ways = longest.startswith("link") and seconds["link from the GPU"] > 0
    return "link to and from the GPU" if is_both_ways else longest
