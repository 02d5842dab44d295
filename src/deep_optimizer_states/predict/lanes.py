"""Lanes that share resources: a fluid discrete-event simulation.

A *lane* does its jobs one after the other, as a CUDA stream or a thread does. Jobs of several lanes
that draw on one resource (a link, host memory) share it: when all together want more than it can
give, each is slowed in the same proportion. Between two events every job runs at a constant rate.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from deep_optimizer_states.plan import Plan

QUEUE_ENTRIES = 1000
"""Copies, kernels, waits and event records that a CUDA stream takes before it blocks whoever issues
the next one. Assumed: CUDA documents no figure, and about a thousand were seen."""
_NEGLIGIBLE = 1e-12
"""Share of a job's work below which it counts as done: rounding must not cost an event."""


@dataclass
class Job:
    """Work of one lane.

    Attributes:
        lane: Who does it.
        what: For traces.
        work: Amount, in units of which ``top_rate`` are done a second at most.
        top_rate: Units a second when nothing else runs; infinite for work that takes no time.
        draws: Units of each resource that one unit of work takes.
        after: Jobs that must be over first.
        entries: Places that it takes in its stream's queue until it is over; 0 for a host thread.
        submit_s: When it was queued.
    """

    lane: str
    what: str
    work: float
    top_rate: float
    draws: Mapping[str, float] = field(default_factory=dict)
    after: tuple[Job, ...] = ()
    entries: int = 0
    left: float = 0.0
    submit_s: float = math.nan
    begin_s: float = math.nan
    end_s: float = math.nan

    @property
    def is_done(self) -> bool:
        """Whether it is over."""
        return not math.isnan(self.end_s)


@dataclass(frozen=True)
class UpdateRun:
    """What a simulated update did.

    Attributes:
        seconds: From its start until all state and weights are in place.
        plan: What ran where, in issue order.
        jobs: Everything the lanes did, in the order it ended.
        ready_s: When each tile's 16-bit weights were where they live.
        binding: The resource that has most to do: the update lasts at least as long as that takes.
    """

    seconds: float
    plan: Plan
    jobs: list[Job]
    ready_s: Mapping[int, float]
    binding: str

    def busy_s(self, lane: str) -> float:
        """Time a lane worked."""
        return sum(job.end_s - job.begin_s for job in self.jobs if job.lane == lane)


Capacity = Callable[[str, Iterable[Job]], float]
"""Units a second that a resource gives while these jobs run."""


class Lanes:
    """A clock and the lanes that work under it.

    Args:
        capacity: What each resource gives.

    Attributes:
        before_step: Called before time passes, for whoever submits work on its own.
    """

    def __init__(self, capacity: Capacity) -> None:
        self._capacity = capacity
        self._queues: dict[str, deque[Job]] = {}
        self._entries: defaultdict[str, int] = defaultdict(int)
        self.now_s = 0.0
        self.done: list[Job] = []
        self.before_step: Callable[[], None] = lambda: None

    def submit(self, job: Job) -> Job:
        """Queue a job behind those of its lane; time passes while that lane's queue is full."""
        while self._queues.get(job.lane) and self._entries[job.lane] + job.entries > QUEUE_ENTRIES:
            self.step()
        job.left, job.submit_s = job.work, self.now_s
        self._entries[job.lane] += job.entries
        self._queues.setdefault(job.lane, deque()).append(job)
        return job

    def run_until(self, job: Job | None) -> None:
        """Let time pass until ``job`` is over; None for all of them."""
        while self._pending() if job is None else not job.is_done:
            self.step()

    def _pending(self) -> bool:
        return any(self._queues.values())

    def step(self) -> None:
        """Let time pass until some job is over."""
        self.before_step()
        active = []
        for queue in self._queues.values():
            if queue and all(other.is_done for other in queue[0].after):
                active.append(queue[0])
        assert active, "the lanes wait for each other"
        for job in active:
            if math.isnan(job.begin_s):
                job.begin_s = self.now_s
        rates = self._rates(active)
        step_s = min(
            job.left / rate if rate > 0 else math.inf
            for job, rate in zip(active, rates, strict=True)
        )
        self.now_s += step_s
        for job, rate in zip(active, rates, strict=True):
            job.left = 0.0 if math.isinf(rate) else job.left - rate * step_s
            if job.left <= job.work * _NEGLIGIBLE:
                job.end_s = self.now_s
                self._queues[job.lane].popleft()
                self._entries[job.lane] -= job.entries
                self.done.append(job)

    def _rates(self, active: list[Job]) -> list[float]:
        wanted: dict[str, float] = {}
        for job in active:
            if not math.isinf(job.top_rate):
                for resource, units in job.draws.items():
                    wanted[resource] = wanted.get(resource, 0.0) + units * job.top_rate
        slowed = {
            resource: min(1.0, self._capacity(resource, active) / total)
            for resource, total in wanted.items()
            if total > 0
        }
        return [
            job.top_rate * min((slowed.get(resource, 1.0) for resource in job.draws), default=1.0)
            for job in active
        ]
