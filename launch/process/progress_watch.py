"""Does a run still move? Its heartbeat is the growth of its log and of its ``metrics.jsonl``."""

from __future__ import annotations

import contextlib
import json
import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from launch.process.growing import GrowingFile

FIRST_ITERATION_S = 1800.0
"""Longest silence before the first iteration: ops compile, weights and samples are made."""
LEAST_S = 300.0
"""Longest silence between two fast iterations; state is hashed and saved after the last."""
SLOWEST_FACTOR = 20.0
"""Longest silence in slowest iterations so far."""
LOOK_S = 0.5
"""Seconds between two looks."""

_ITERATION_LINE = re.compile(rb"elapsed time per iteration \(ms\):\s*([0-9.]+)")


@dataclass(frozen=True)
class Stall:
    """A silence that lasted too long."""

    idle_s: float
    """Seconds without a heartbeat."""
    limit_s: float
    """How many were allowed."""
    iterations: int
    """Iterations that were done before it."""

    def describe(self) -> str:
        """Words for a status' cause."""
        after = f"iteration {self.iterations}" if self.iterations else "its start, no iteration yet"
        return f"no progress for {self.idle_s:.0f} s (limit {self.limit_s:.0f} s) after {after}"


class ProgressWatch:
    """Follows a run's log and metrics."""

    def __init__(
        self,
        log: Path,
        metrics: Path | None,
        hang_s: float | None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin to watch.

        Args:
            log: output of the ranks.
            metrics: the trainer's ``metrics.jsonl``; None where the trainer writes none.
            hang_s: longest silence in seconds; None adapts it to the run, 0 allows any.
            now: clock, in seconds.
        """
        # Each file with what finds an iteration's time in a line, and the times found, in ms.
        self._files: list[tuple[GrowingFile, Callable[[bytes], float | None], list[float]]] = []
        for path, read in ((log, _ms_in_log), (metrics, _ms_in_metrics)):
            if path is not None:
                start = path.stat().st_size if path.exists() else 0
                self._files.append((GrowingFile(path, start), read, []))
        self._hang_s = hang_s
        self._now = now
        self._looked = now()
        self._idle_s = 0.0

    @property
    def limit_s(self) -> float:
        """Silence that is allowed now."""
        if self._hang_s is not None:
            return self._hang_s or float("inf")
        if self._iterations == 0:
            return FIRST_ITERATION_S
        slowest_ms = max(max(times_ms, default=0.0) for *_, times_ms in self._files)
        return max(LEAST_S, SLOWEST_FACTOR * slowest_ms / 1000.0)

    def look(self) -> Stall | None:
        """Look at the files, at most once in :data:`LOOK_S`; the stall when there is one."""
        passed_s = self._now() - self._looked
        if passed_s < LOOK_S:
            return None
        self._looked += passed_s
        # While we were stopped ourselves, as a whole suspended job is, nothing counts as silence.
        self._idle_s += min(passed_s, 4 * LOOK_S)
        for file, read, times_ms in self._files:
            found = map(read, file.new_lines())
            times_ms += [milliseconds for milliseconds in found if milliseconds is not None]
            if file.has_grown:
                self._idle_s = 0.0
        limit_s = self.limit_s
        if self._idle_s < limit_s:
            return None
        return Stall(self._idle_s, limit_s, self._iterations)

    @property
    def _iterations(self) -> int:
        return max(len(times_ms) for *_, times_ms in self._files)


def _ms_in_log(line: bytes) -> float | None:
    """Time of an iteration's line; None for any other line."""
    match = _ITERATION_LINE.search(line)
    return _number(match[1]) if match else None


def _ms_in_metrics(line: bytes) -> float | None:
    """Time of an ``iteration`` event; None for any other line."""
    with contextlib.suppress(ValueError):
        event = json.loads(line)
        if isinstance(event, dict) and event.get("event") == "iteration":
            return _number(event.get("iteration_ms"))
    return None


def _number(value: object) -> float:
    """A time as a log or a file says it; 0 where that is no number."""
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return 0.0
    return number if math.isfinite(number) else 0.0
