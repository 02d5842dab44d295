"""Times of alternatives, taken in turns so that they share whatever else the machine does."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

from configs.errors import ConfigError


class BenchmarkError(ConfigError):
    """The command cannot do what it was asked."""


@dataclass(frozen=True)
class Times:
    """Seconds of one alternative, in the order they were taken."""

    seconds: tuple[float, ...]

    @property
    def median_s(self) -> float:
        """The median of the repeats."""
        return median(self.seconds)

    @property
    def quartiles_s(self) -> tuple[float, float]:
        """First and third quartile, or the lowest and highest of fewer than four repeats."""
        if len(self.seconds) < 4:
            return min(self.seconds), max(self.seconds)
        low, _, high = quantiles(self.seconds, n=4, method="inclusive")
        return low, high

    def ratio_to(self, other: Times) -> float:
        """Return the median of :meth:`ratios_to`."""
        return self.ratios_to(other).median_s

    def ratios_to(self, other: Times) -> Times:
        """Return how many times longer than ``other`` each turn took."""
        turns = zip(self.seconds, other.seconds, strict=True)
        return Times(tuple(a / b for a, b in turns))

    def scaled(self, factor: float) -> Times:
        """Return every time multiplied by a factor."""
        return Times(tuple(factor * seconds for seconds in self.seconds))

    def as_json(self) -> dict[str, Any]:
        """Return median, quartiles and number of repeats."""
        low, high = self.quartiles_s
        return {"median": self.median_s, "low": low, "high": high, "repeats": len(self.seconds)}


def total(parts: Sequence[Times]) -> Times:
    """Return the times of all parts together, turn by turn."""
    return Times(tuple(map(sum, zip(*(part.seconds for part in parts), strict=True))))


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
