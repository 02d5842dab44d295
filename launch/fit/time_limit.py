"""How long a call of a sweep may take, and whether a run still fits into it."""

from __future__ import annotations

import time
from collections.abc import Callable


class TimeLimit:
    """A number of seconds from now.

    Args:
        seconds: That may pass in all.
        clock: Gives the time in seconds; for tests.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end_s = clock() + seconds

    @property
    def left_s(self) -> float:
        """Seconds left, not below 0."""
        return max(0.0, self._end_s - self._clock())

    def refuse(self, expected_s: float) -> str:
        """Why a run of so many seconds is not to be started; empty when it is likely to end."""
        left_s = self.left_s
        if 0 < left_s >= expected_s:
            return ""
        return f"it takes about {expected_s:.0f} s, and {left_s:.0f} s of --minutes are left"
