"""Does a run still move? Its heartbeat is the growth of its log and of its ``metrics.jsonl``."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

FIRST_ITERATION_S = 1800.0
"""Longest silence before the first iteration: ops compile, weights and samples are made."""
LEAST_S = 300.0
"""Longest silence between two fast iterations; state is hashed and saved after the last."""
SLOWEST_FACTOR = 20.0
"""Longest silence in slowest iterations so far."""
LOOK_S = 0.5
"""Seconds between two looks."""

_MOST_BYTES = 2**20
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
        self._log = _Growing(log)
        self._metrics = None if metrics is None else _Growing(metrics)
        self._hang_s = hang_s
        self._now = now
        self._looked = now()
        self._idle_s = 0.0
        self._in_log = _Iterations()
        self._in_metrics = _Iterations()

    @property
    def limit_s(self) -> float:
        """Silence that is allowed now."""
        if self._hang_s is not None:
            return self._hang_s or float("inf")
        if self._iterations == 0:
            return FIRST_ITERATION_S
        slowest_ms = max(self._in_log.slowest_ms, self._in_metrics.slowest_ms)
        return max(LEAST_S, SLOWEST_FACTOR * slowest_ms / 1000.0)

    def look(self) -> Stall | None:
        """Look at the files, at most once in :data:`LOOK_S`; the stall when there is one."""
        passed_s = self._now() - self._looked
        if passed_s < LOOK_S:
            return None
        self._looked += passed_s
        # While we were stopped ourselves, as a whole suspended job is, nothing counts as silence.
        self._idle_s += min(passed_s, 4 * LOOK_S)
        if self._has_grown():
            self._idle_s = 0.0
        limit_s = self.limit_s
        if self._idle_s < limit_s:
            return None
        return Stall(self._idle_s, limit_s, self._iterations)

    @property
    def _iterations(self) -> int:
        return max(self._in_log.count, self._in_metrics.count)

    def _has_grown(self) -> bool:
        log_lines = self._log.new_lines()
        for line in log_lines:
            if match := _ITERATION_LINE.search(line):
                self._in_log.add(match[1])
        grown = self._log.has_grown
        if self._metrics is not None:
            for line in self._metrics.new_lines():
                self._in_metrics.add(_iteration_ms(line))
            grown = grown or self._metrics.has_grown
        return grown


class _Iterations:
    def __init__(self) -> None:
        self.count = 0
        self.slowest_ms = 0.0

    def add(self, milliseconds: object) -> None:
        if milliseconds is None:
            return
        self.count += 1
        try:
            value = float(milliseconds)  # type: ignore[arg-type]  # whatever a log or a file says
        except (TypeError, ValueError):
            return
        if value < float("inf"):
            self.slowest_ms = max(self.slowest_ms, value)


class _Growing:
    """A file that others append to."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = path.stat().st_size if path.exists() else 0
        self._part = b""
        self.has_grown = False

    def new_lines(self) -> list[bytes]:
        """Whole lines since the last call; of a huge growth the last mebibyte."""
        self.has_grown = False
        try:
            size = self._path.stat().st_size
            if size == self._position:
                return []
            self.has_grown = True
            with self._path.open("rb") as file:
                if size - self._position > _MOST_BYTES or size < self._position:
                    self._part = b""
                    self._position = max(0, size - _MOST_BYTES)
                file.seek(self._position)
                text = file.read(_MOST_BYTES)
        except OSError:  # not made yet, or a file system that has gone for a while
            return []
        self._position += len(text)
        *lines, self._part = (self._part + text).split(b"\n")
        return lines


def _iteration_ms(line: bytes) -> object:
    """Time of an ``iteration`` event; None for any other line."""
    try:
        event = json.loads(line)
    except ValueError:
        return None
    if not isinstance(event, dict) or event.get("event") != "iteration":
        return None
    return event.get("iteration_ms", "unknown")
