"""What a person sees while something is timed: how far it is, and what else keeps the CPUs busy."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import psutil

Say = Callable[[str], None]
BUSY_SHARE = 0.05
"""Of the usable CPUs: a figure that was taken while others used more of them is not to be trusted.
Below it lies what a quiet machine does by itself."""
_LOOK_S = 0.5
"""How long is looked before the timing."""
_BEAT_S = 15.0
"""A step that takes longer says that it goes on."""
_MOST_NAMES = 3


class Steps:
    """Numbers the steps of a measurement, and says of a long one that it goes on.

    Args:
        say: Gets a line when a step begins, and another every 15 seconds.
        total: How many steps there will be.
    """

    def __init__(self, say: Say, total: int) -> None:
        self._say = say
        self._total = total
        self._begun = 0

    @contextlib.contextmanager
    def step(self, what: str) -> Iterator[None]:
        """Do the next step, whose name ``what`` is said."""
        self._begun += 1
        number, begin_s = f"[{self._begun}/{self._total}]", time.monotonic()
        self._say(f"{number} {what} ...")
        over = threading.Event()

        def beat() -> None:
            while not over.wait(_BEAT_S):
                self._say(f"{number} {what}: for {time.monotonic() - begin_s:.0f} s now")

        # It wakes four times a minute, which no figure shows.
        thread = threading.Thread(target=beat, name=f"{what} (beat)", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


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

    def warning(self, verb: str, names: str = "") -> str:
        """Return a warning for the user, empty where the CPUs were free enough."""
        used = self.used_cpus()
        if used <= BUSY_SHARE * self.cpus:
            return ""
        return (
            f"warning: other processes {verb} {used:.1f} of {self.cpus} CPUs{names}: figures come "
            "out too low; measure again when nothing else runs"
        )


def look_around(say: Say) -> OtherWork:
    """Look for half a second at what else runs, and warn of it; what follows is to be timed.

    Returns:
        For :meth:`OtherWork.warning`, once the timing is over.
    """
    work, before = OtherWork(), _seconds_by_process()
    time.sleep(_LOOK_S)
    after = _seconds_by_process()
    used = {who: seconds - before[who] for who, seconds in after.items() if who in before}
    busiest = sorted((who for who in used if used[who] > 0), key=lambda who: -used[who])
    names = ", ".join(f"{name} {pid}" for pid, name in busiest[:_MOST_NAMES])
    if warning := work.warning("use", f" ({names})" if names else ""):
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


def _seconds_by_process() -> Mapping[tuple[int, str], float]:
    """CPU seconds of every other process, by its number and name."""
    found = {}
    for process in psutil.process_iter(["name", "cpu_times"]):
        times = process.info["cpu_times"]
        if times is not None and process.pid != os.getpid():
            found[process.pid, str(process.info["name"])] = times.user + times.system
    return found
