"""A list-scheduling simulator: jobs on lanes that share resources.

A *lane* does its jobs one after the other, as a CUDA stream or a thread does. A job begins when
those before it on its lane and those that it waits for are over. Jobs that draw on one resource (a
link, host memory, cores) share it: when all together want more than it gives, each is slowed in
the same proportion. Between two events every job runs at a constant rate.

Nothing here imports torch.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

_NEGLIGIBLE = 1e-12
"""Share of a job's work below which it counts as done: rounding must not cost an event."""


@dataclass(eq=False)
class Job:
    """Work of one lane.

    Attributes:
        lane: Who does it.
        what: Name for traces.
        work: Amount, in units of which ``top_rate`` are done a second at most.
        top_rate: Units a second when nothing else runs; finite.
        draws: Units of each resource that one unit of work takes.
        after: Jobs that must be over first.
        begin_s: When it began; not a number before that.
        end_s: When it ended; not a number before that.
    """

    lane: str
    what: str
    work: float
    top_rate: float = 1.0
    draws: Mapping[str, float] = field(default_factory=dict)
    after: tuple[Job, ...] = ()
    left: float = 0.0
    begin_s: float = math.nan
    end_s: float = math.nan

    @property
    def is_done(self) -> bool:
        """Return whether it is over."""
        return not math.isnan(self.end_s)


Capacity = Callable[[str, set[str]], float]
"""Units a second that a resource gives while the resources of a set are in use."""


class Simulator:
    """A clock and the lanes that work under it.

    Args:
        capacity: What each resource gives.

    Attributes:
        now_s: The time.
        done: Jobs that are over, in the order in which they ended.
    """

    def __init__(self, capacity: Capacity) -> None:
        self._capacity = capacity
        self._queues: dict[str, deque[Job]] = {}
        self.now_s = 0.0
        self.done: list[Job] = []

    def submit(self, job: Job) -> Job:
        """Queue a job behind those of its lane."""
        job.left = job.work
        self._queues.setdefault(job.lane, deque()).append(job)
        return job

    def run_until(self, job: Job | None = None) -> None:
        """Let time pass until ``job`` is over; None for all of them."""
        while self._queues if job is None else not job.is_done:
            self.step()

    def step(self) -> None:
        """Let time pass until some job is over."""
        active = [
            queue[0]
            for queue in self._queues.values()
            if all(other.is_done for other in queue[0].after)
        ]
        assert active, "the lanes wait for each other"
        rates = self._rates(active)
        running = list(zip(active, rates, strict=True))
        step_s = min(job.left / rate for job, rate in running)
        for job, rate in running:
            if math.isnan(job.begin_s):
                job.begin_s = self.now_s
            job.left -= rate * step_s
        self.now_s += step_s
        for job in active:
            if job.left <= job.work * _NEGLIGIBLE:
                self._end(job)

    def _end(self, job: Job) -> None:
        job.end_s = self.now_s
        self.done.append(job)
        queue = self._queues[job.lane]
        queue.popleft()
        if not queue:
            del self._queues[job.lane]

    def _rates(self, active: list[Job]) -> list[float]:
        wanted: dict[str, float] = {}
        for job in active:
            for resource, units in job.draws.items():
                wanted[resource] = wanted.get(resource, 0.0) + units * job.top_rate
        in_use = set(wanted)
        shares = {
            resource: min(1.0, self._capacity(resource, in_use) / total)
            for resource, total in wanted.items()
        }
        return [
            job.top_rate * min((shares[resource] for resource in job.draws), default=1.0)
            for job in active
        ]
