"""Time that a benchmark may take, and what of its work still fits into it."""

from __future__ import annotations

import time
from collections.abc import Callable


class Budget:
    """A number of seconds from now.

    Args:
        seconds: That may pass in all.
        clock: Gives the time in seconds; for tests.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end_s = clock() + seconds
        self._longest_s: dict[str, float] = {}

    @property
    def left_s(self) -> float:
        """Seconds left, not below 0."""
        return max(0.0, self._end_s - self._clock())

    def took(self, name: str, seconds: float) -> None:
        """Remember how long a piece of work took, for the next time."""
        self._longest_s[name] = max(seconds, self._longest_s.get(name, 0.0))

    def guess_s(self, name: str) -> float:
        """Seconds that a piece of work will take: what it took, or what the longest other took.

        A piece that nothing is known of is guessed as 0: one has to be the first.
        """
        known = self._longest_s.get(name)
        return known if known is not None else max(self._longest_s.values(), default=0.0)

    def fits(self, name: str) -> bool:
        """Whether a piece of work, started now, is likely to end in time."""
        return self.left_s > self.guess_s(name)
