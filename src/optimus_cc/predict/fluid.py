"""An event simulation in which activities share what they use: cores, and links.

All users of a resource get the same share of its capacity, and an activity goes at the smallest of
its shares. Processes are generators that yield the events they wait for.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Generator, Iterable
from dataclasses import dataclass, field

Process = Generator[Iterable["Event"], None, None]
_SAME_TIME = 1 + 1e-9
"""Ends this close, as a share of the time to them, are one moment: sums are rounded."""


class Event:
    """Something that happens once."""

    def __init__(self) -> None:
        self.is_over = False
        self.followers: list[_Waiting] = []


@dataclass
class Resource:
    """What activities share, such as the cores of a machine or one direction of a link."""

    capacity: float
    """Work a second."""
    burst: float = 0.0
    """Work that goes through at once after a pause: the size of a shaped link's token bucket."""
    num_users: int = field(default=0, init=False)
    _tokens: float = field(default=math.inf, init=False)
    _idle_since_s: float = field(default=0.0, init=False)

    def tokens(self, now_s: float) -> float:
        """Work that goes through at once now; none while it is in use."""
        if self.num_users or not self.burst:
            return 0.0
        return min(self.burst, self._tokens + (now_s - self._idle_since_s) * self.capacity)

    def take(self, tokens: float, now_s: float) -> None:
        """Begin to use it, with some of the work at once."""
        self._tokens = self.tokens(now_s) - tokens
        self.num_users += 1

    def leave(self, now_s: float) -> None:
        """End to use it."""
        self.num_users -= 1
        self._idle_since_s = now_s


@dataclass
class _Activity:
    remaining: float
    resources: tuple[Resource, ...]
    limit: float
    end: Event

    @property
    def rate(self) -> float:
        return min([self.limit, *(r.capacity / r.num_users for r in self.resources)])


@dataclass
class _Waiting:
    """A process, and how many of the events that it yielded are still to come."""

    process: Process
    missing: int = 0


class Simulation:
    """Time, the activities that are under way, and the processes."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._active: list[_Activity] = []
        self._ready: deque[_Waiting] = deque()
        self._num_processes = 0

    def start(self, work: float, *resources: Resource, limit: float = math.inf) -> Event:
        """Begin an activity.

        Args:
            work: how much, in the resources' unit.
            resources: that it uses, all of them until its end.
            limit: work a second that it does at most.

        Returns:
            Its end.
        """
        end = Event()
        tokens = (resource.tokens(self.now_s) for resource in resources)
        at_once = min(work, min(tokens, default=0.0))
        for resource in resources:
            resource.take(at_once, self.now_s)
        self._active.append(_Activity(work - at_once, resources, limit, end))
        return end

    def pause(self, seconds: float) -> Event:
        """An event after some time."""
        return self.start(seconds, limit=1.0)

    def follow(self, process: Process) -> Event:
        """Run a process beside the others; returns its end."""
        end = Event()

        def until_end() -> Process:
            yield from process
            self.happen(end)

        self._num_processes += 1
        self._ready.append(_Waiting(until_end()))
        return end

    def run(self) -> None:
        """Run to the end of all processes."""
        self._resume()
        while self._num_processes:
            assert self._active, "processes wait for each other"
            waits = [(one.remaining / one.rate, one) for one in self._active]
            step_s = min(wait for wait, _ in waits)
            self.now_s += step_s
            ended = [one for wait, one in waits if wait <= step_s * _SAME_TIME]
            rates = [(one, one.rate) for wait, one in waits if wait > step_s * _SAME_TIME]
            for one, rate in rates:
                one.remaining -= rate * step_s
            self._active = [one for one, _ in rates]
            for one in ended:
                for resource in one.resources:
                    resource.leave(self.now_s)
                self.happen(one.end)
            self._resume()

    def happen(self, event: Event) -> None:
        """Let an event happen, so that who waits for it goes on."""
        event.is_over = True
        for waiting in event.followers:
            waiting.missing -= 1
            if not waiting.missing:
                self._ready.append(waiting)
        event.followers.clear()

    def _resume(self) -> None:
        while self._ready:
            waiting = self._ready.popleft()
            try:
                events = [event for event in next(waiting.process) if not event.is_over]
            except StopIteration:
                self._num_processes -= 1
                continue
            waiting.missing = len(events)
            for event in events:
                event.followers.append(waiting)
            if not events:
                self._ready.append(waiting)
