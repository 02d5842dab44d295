"""Figures of a whole run in little memory, however long it is."""

from __future__ import annotations

import math
from statistics import median

_KEPT = 20_000


class Series:
    """A thinned series: it keeps evenly spaced values, and every one while they are few."""

    def __init__(self) -> None:
        self.count = 0
        self.kept: list[float] = []
        self._every = 1

    def add(self, value: float) -> None:
        """Take the next value; those that are not finite count, and are not kept."""
        if self.count % self._every == 0 and math.isfinite(value):
            self.kept.append(value)
            if len(self.kept) >= 2 * _KEPT:
                self.kept = self.kept[::2]
                self._every *= 2
        self.count += 1

    @property
    def median(self) -> float:
        """Median of what is kept; 0 for none."""
        return median(self.kept) if self.kept else 0.0


class Standstill:
    """How long the last value has been the same."""

    def __init__(self) -> None:
        self.value: float | None = None
        self.length = 0
        self.line = 0
        """Line of the first of them."""
        self.before: float | None = None
        """The value before them."""

    def add(self, value: float, line: int) -> None:
        """Take the next value."""
        if value == self.value:
            self.length += 1
        else:
            self.before, self.value, self.length, self.line = self.value, value, 1, line
