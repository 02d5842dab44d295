"""What else keeps the CPUs busy while something is timed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import psutil

Say = Callable[[str], None]
BUSY_SHARE = 0.05
"""Of the usable CPUs: a figure that was taken while others used more of them is not to be trusted.
Below it lies what a quiet machine does by itself."""
_LOOK_S = 0.5
"""How long is looked before the timing."""


@dataclass
class OtherWork:
    """What other processes did on the CPUs that this one may use, from when it is made.

    Other processes are all but this one and those that it has started and waited for.
    """

    cpus: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))
    _since: tuple[float, float, float] = field(default_factory=lambda: _cpu_seconds())

    def used_cpus(self) -> float:
        """Return how many CPUs they used on average until now."""
        pairs = zip(_cpu_seconds(), self._since, strict=True)
        seconds, busy, own = (later - before for later, before in pairs)
        return max(0.0, busy - own) / seconds if seconds > 0 else 0.0

    def warning(self, verb: str) -> str:
        """Return a warning for the user, empty where the CPUs were free enough."""
        used = self.used_cpus()
        if used <= BUSY_SHARE * self.cpus:
            return ""
        return (
            f"warning: other processes {verb} {used:.1f} of {self.cpus} CPUs: figures come out too "
            "low; measure again when nothing else runs"
        )


def look_around(say: Say) -> OtherWork:
    """Look for half a second at what else runs, and warn of it; what follows is to be timed.

    Returns:
        For :meth:`OtherWork.warning`, once the timing is over.
    """
    work = OtherWork()
    time.sleep(_LOOK_S)
    if warning := work.warning("use"):
        say(warning)
    return OtherWork()


def _cpu_seconds() -> tuple[float, float, float]:
    """Return a clock, the seconds that the usable CPUs have worked, and this process's own.

    Of children only those count that have been waited for.
    """
    usable = os.sched_getaffinity(0)
    rows = psutil.cpu_times(percpu=True)
    # Guests are counted among user time; what a hypervisor gave to others was taken from this.
    parts = ("user", "nice", "system", "irq", "softirq", "steal")
    chosen = [row for cpu, row in enumerate(rows) if cpu in usable] or rows
    busy = sum(getattr(row, part, 0.0) for row in chosen for part in parts)
    return time.monotonic(), busy, sum(os.times()[:4])
