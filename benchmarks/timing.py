"""Times of alternatives, taken in turns so that they share whatever else the machine does."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median, quantiles


@dataclass(frozen=True)
class Times:
    """Seconds of one alternative, in the order they were taken."""

    seconds: tuple[float, ...]

    @property
    def median_s(self) -> float:
        """Middle of the repeats."""
        return median(self.seconds)

    @property
    def quartiles_s(self) -> tuple[float, float]:
        """First and third quartile; both the median when there are fewer than four repeats."""
        if len(self.seconds) < 4:
            return self.median_s, self.median_s
        low, _, high = quantiles(self.seconds, n=4, method="inclusive")
        return low, high

    def ratio_to(self, other: Times) -> float:
        """How many times longer than ``other``: the median of the ratios taken turn by turn."""
        return median(a / b for a, b in zip(self.seconds, other.seconds, strict=True))


def in_turns(alternatives: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, Times]:
    """Time every alternative once, then all again.

    Args:
        alternatives: What to time, by name; each is run once beforehand.
        repeats: Turns that count.
    """
    for work in alternatives.values():
        work()
    taken: dict[str, list[float]] = {name: [] for name in alternatives}
    for _ in range(repeats):
        for name, work in alternatives.items():
            begin = time.perf_counter()
            work()
            taken[name].append(time.perf_counter() - begin)
    return {name: Times(tuple(seconds)) for name, seconds in taken.items()}
