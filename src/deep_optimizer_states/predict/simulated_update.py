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
from deep_optimizer_states.core.policies import Flight, HostStep, PlaceTile, RunTimeSplit
from deep_optimizer_states.core.schedule import (
    NUM_AHEAD,
    NUM_SLOTS,
    NUM_STAGING_BUFFERS,
    AllAtOnce,
)
from deep_optimizer_states.predict.machine import Machine
from deep_optimizer_states.predict.memory import ranks_a_node
from deep_optimizer_states.predict.model import FP32_BYTES
from deep_optimizer_states.predict.simulator import Job, Simulator
from deep_optimizer_states.predict.workload import StockOffload, Workload

STOCK_HOST_BYTES = 48
"""Host bytes a parameter that DeepSpeed's own update moves: gradient, unscale, Adam, downcast."""
FLAT_HOST_BYTES = 36
"""The same below stage 3, for the step alone: unscaling, and Adam's reads and writes."""
CAST_BYTES = 6
"""Below stage 3 stock casts its new master weights into page-locked memory: fp32 read, 16 bits
written; then it copies them to the device, and waits for nothing but that."""
UNSCALE_BYTES = 8
"""Stock multiplies the fp32 gradient in a pass of its own: read and written."""
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
class Rank:
    """Rates of one rank when all of its node work at once: bytes, or parameters, a second."""

    host_bytes_per_s: float  # its share of the host's memory bandwidth
    host_parameters_per_s: float  # its host lane alone, with the kernel of whoever updates
    host_bytes: int  # that this kernel moves in host memory, a parameter
    links: Mapping[str, float]  # h2d and d2h, page-locked: alone, and "_both" ways at once
    device_parameters_per_s: float  # Adam on the device
    blocking_parameters_per_s: float  # weights that a host thread sends to the device

    @property
    def host_alone_parameters_per_s(self) -> float:
        """Rate of the host lane when nothing else uses host memory."""
        return min(self.host_parameters_per_s, self.host_bytes_per_s / self.host_bytes)

    def capacity(self, resource: str, in_use: set[str]) -> float:
        """Return the bytes a second of a link or of host memory, while others are in use."""
        if resource == "host":
            return self.host_bytes_per_s
        return self.links[f"{resource}_both" if {"h2d", "d2h"} <= in_use else resource]


def rank_of(workload: Workload, machine: Machine) -> Rank:
    """Return what one rank of ``workload`` gets of ``machine``.

    Raises:
        MachineError: A rate that is needed was not measured.
    """
    per_node = ranks_a_node(workload, machine)
    threads = max(1.0, machine.cores / per_node)
    host = machine.curve("host_stream_bytes_per_s", machine.cores) / per_node
    stream = min(machine.curve("host_stream_bytes_per_s", threads), host)
    if workload.software is None:
        # Measured with fp32 state; with less to read and write it is no slower.
        adam = machine.curve("host_fused_parameters_per_s", threads)
        num_bytes = fused_host_bytes(workload)
    else:
        alone = machine.curve("host_adam_parameters_per_s", threads)
        adam = 1.0 / (1.0 / alone + UNSCALE_BYTES / stream)
        num_bytes = STOCK_HOST_BYTES if workload.stage == 3 else FLAT_HOST_BYTES
    if not machine.gpus:
        # The "device" is the host's own memory: its copies are copies of the host.
        names = ("h2d", "d2h", "h2d_both", "d2h_both")
        return Rank(
            host, adam, num_bytes, dict.fromkeys(names, stream / 2), adam, stream / 2 / FP32_BYTES
        )
    links = {way: machine.rate(f"{way}_bytes_per_s") for way in ("h2d", "d2h")}
    for way, alone in tuple(links.items()):
        links[f"{way}_both"] = getattr(machine.rates, f"{way}_both_bytes_per_s") or alone
    device = machine.rate("device_adam_parameters_per_s") * (1.0 - workload.hog_share)
    if workload.stage < 3:
        sent = 1.0 / (CAST_BYTES / stream + workload.weight_bytes / links["h2d"])
    else:
        blocking = machine.rates.pageable_h2d_bytes_per_s or links["h2d"]
        sent = blocking / workload.weight_bytes
    return Rank(host, adam, num_bytes, links, device, sent)


def fused_host_bytes(workload: Workload) -> int:
    """Return the host bytes a parameter of this engine's pass.

    State is read and written, the gradient read, the weight written.
    """
    return 2 * workload.state_bytes + workload.final_grad_bytes + workload.weight_bytes


@dataclass(frozen=True)
class UpdateRun:
    """A simulated update."""

    seconds: float  # from its start until all state and weights are in place
    plan: Plan  # what ran where, in issue order
    jobs: list[Job]  # what the lanes did, in the order in which it ended
    ready_s: Mapping[int, float]  # until a tile's 16-bit weights were where they live
    binding: str  # the resource that has most to do, which the update lasts at least as long as


def simulate_update(workload: Workload, machine: Machine) -> UpdateRun:
    """Simulate one rank's update phase; every rank of a node does the same at the same time.

    Raises:
        MachineError: A rate that is needed was not measured.
    """
    split = RunTimeSplit()
    if workload.software is None and workload.schedule.dynamic:
        for _ in range(LEARNING_UPDATES):
            _Update(workload, machine, split).run()
    return _Update(workload, machine, split).run()


@dataclass
class _Slot:
    """A slot on the device or a staging buffer on the host, by the jobs that use it."""

    free: Job | None = None
    filled: Job | None = None


class _Update:
    """One rank's update under way; it teaches the dynamic split when it is over.

    This package steps tile after tile, other software subgroup after subgroup.
    """

    def __init__(self, workload: Workload, machine: Machine, split: RunTimeSplit) -> None:
        self.workload, self.software, self.split = workload, workload.software, split
        self.rank = rank_of(workload, machine)
        self.simulator = Simulator(self.rank.capacity)
        num_slots = self.software.slots if self.software else NUM_SLOTS
        self.slots = deque(_Slot() for _ in range(num_slots))
        self.staging = itertools.cycle([_Slot() for _ in range(NUM_STAGING_BUFFERS)])
        self.held: dict[int, _Slot] = {}
        self.weights_sent: Job | None = None
        self.ready: dict[int, Job] = {}
        self.numels: Sequence[int] = workload.subgroups
        self.state_bytes = workload.state_bytes
        self.prefetched_bytes = self.state_bytes
        if self.software is None:
            self.numels = [tile.numel for tile in workload.schedule.tiles]
            self.prefetched_bytes += workload.final_grad_bytes
        self.flights: list[tuple[Job, Job]] = []
        self.landed = 0
        self.host_steps: list[HostStep] = []

    def run(self) -> UpdateRun:
        handlers = {
            Kind.PREFETCH: self.prefetch,
            Kind.DEVICE_STEP: self.device_step,
            Kind.STATE_FLUSH: self.state_flush,
            Kind.HOST_STEP: self.host_step,
            Kind.WEIGHTS: self.weights,
        }
        issued = []
        for action in self.actions():
            handlers[action.kind](action.tile, self.numels[action.tile])
            issued.append(action)
        for job in self.ready.values():
            if job.lane == "GPU":
                self.simulator.run_until(job)
        stepped_s = self.simulator.now_s
        self.simulator.run_until()
        flights = [Flight(int(end.work), begin.begin_s, end.end_s) for begin, end in self.flights]
        self.split.learn(self.host_steps, flights, self.simulator.now_s)
        nobody_waits = self.software is not None and self.software.slots
        return UpdateRun(
            stepped_s if nobody_waits else self.simulator.now_s,
            Plan(len(self.numels), tuple(issued)),
            self.simulator.done,
            {tile: job.end_s for tile, job in self.ready.items()},
            _binding(self.simulator.done, self.rank),
        )

    def actions(self) -> Iterator[Action]:
        if self.software:
            return _stock_actions(self.workload, self.software)
        arrivals = AllAtOnce(range(len(self.numels)))
        return self.workload.schedule.actions(arrivals, self.start_split, self.has_room)

    def start_split(self, tiles: Sequence[int], numels: Sequence[int]) -> PlaceTile:
        def in_flight_numel() -> int:
            return int(sum(flush.work for _, flush in self.in_flight()))

        return self.split.start_split(tiles, numels, in_flight_numel)

    def in_flight(self) -> list[tuple[Job, Job]]:
        while self.landed < len(self.flights) and self.flights[self.landed][1].is_done:
            self.landed += 1
        return self.flights[self.landed :]

    def has_room(self, wait: bool) -> bool:
        """Decide as the executor does whether the device may be given one more tile."""
        while len(found := self.in_flight()) >= NUM_AHEAD:
            if not wait:
                return False
            self.simulator.run_until(found[0][1])
        return True

    # What each action of a plan submits; the host thread waits for its own work.

    def prefetch(self, tile: int, numel: int) -> None:
        slot = self.held[tile] = self.slots.popleft()
        self.slots.append(slot)
        after = [job for job in (slot.free, self.weights_sent) if job is not None]
        slot.filled = self.copy("H2D", f"prefetch {tile}", numel, self.prefetched_bytes, *after)

    def device_step(self, tile: int, numel: int) -> None:
        slot = self.held.get(tile)  # none for a resident tile
        if slot and self.software:
            self.simulator.run_until(slot.filled)
            self.block(f"gradient {tile}", numel, self.rank.links["h2d"] / FP32_BYTES)
        after = (slot.filled,) if slot and slot.filled else ()
        job = Job("GPU", f"step {tile}", numel, self.rank.device_parameters_per_s, after=after)
        self.ready[tile] = self.simulator.submit(job)

    def state_flush(self, tile: int, numel: int) -> None:
        stepped, slot = self.ready[tile], self.held.pop(tile, None)
        if self.workload.weights_on_host:
            size = self.workload.weight_bytes
            stepped = self.ready[tile] = self.copy("D2H", f"weights {tile}", numel, size, stepped)
        if slot is not None:  # a resident tile sends its weights alone
            slot.free = self.copy("D2H", f"flush {tile}", numel, self.state_bytes, stepped)
            assert slot.filled is not None, tile
            self.flights.append((slot.filled, slot.free))

    def host_step(self, tile: int, numel: int) -> None:
        issued_s = self.simulator.now_s
        if not self.workload.weights_on_host:
            staging = self.held[tile] = next(self.staging)
            if staging.free is not None:
                self.simulator.run_until(staging.free)
        rank = self.rank
        job = self.on_cpu(f"step {tile}", numel, rank.host_parameters_per_s, rank.host_bytes)
        if self.workload.weights_on_host:
            self.ready[tile] = job
        step = HostStep(int(job.work), job.begin_s - issued_s, job.end_s - job.begin_s)
        self.host_steps.append(step)

    def weights(self, tile: int, numel: int) -> None:
        what = f"weights {tile}"
        if self.software and not self.software.slots:
            job = self.block(what, numel, self.rank.blocking_parameters_per_s)
        else:
            job = self.copy("weights", what, numel, self.workload.weight_bytes)
            self.weights_sent = None if self.software else job
        self.held.pop(tile).free = self.ready[tile] = job

    def copy(self, lane: str, what: str, numel: int, num_bytes: int, *after: Job) -> Job:
        """Queue a copy of ``num_bytes`` a parameter."""
        link = _LINKS[lane]
        rate = self.rank.capacity(link, {link}) / num_bytes
        draws = {link: float(num_bytes), "host": float(num_bytes)}
        return self.simulator.submit(Job(lane, what, numel, rate, draws, after))

    def block(self, what: str, numel: int, rate: float) -> Job:
        """Let the CPU lane itself copy, and read fp32 values."""
        return self.on_cpu(f"{_BLOCKING} of {what}", numel, rate, FP32_BYTES)

    def on_cpu(self, what: str, numel: int, rate: float, num_bytes: int) -> Job:
        """Let the CPU lane work on so many bytes a parameter, and wait until it has."""
        job = self.simulator.submit(Job("CPU", what, numel, rate, {"host": float(num_bytes)}))
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
