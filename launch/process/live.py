"""The line that tells how a run fares while it goes on.

On a terminal it is one line that changes; in a file, as of a CI job, a new line every ten seconds.
"""

from __future__ import annotations

import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import TextIO

from configs.cli import COLUMNS
from deep_optimizer_states.units import GIB
from launch.process.watch import LOOK_S, ProgressWatch, duration_text

PLAIN_S = 10.0
"""Seconds from one line to the next where lines stay."""
_BEFORE = "ranks import, and build model and engine: "
_ERASE = "\r\x1b[K"


class LiveLine:
    """Point, iteration, loss, times, memory and what is left of one run."""

    def __init__(
        self,
        head: str,
        iterations: int,
        later_s: float | None = None,
        out: TextIO | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Say nothing yet.

        Args:
            head: Which run it is, as ``[2/3] tiny stride 2``.
            iterations: The last one's number.
            later_s: Seconds that later runs are expected to take; None where there are none.
            out: Where to write, by default standard output.
            now: A clock, in s.
        """
        self._head, self._iterations, self._later_s = head, iterations, later_s
        self._out = sys.stdout if out is None else out
        self._changes = self._out.isatty() and os.environ.get("TERM") != "dumb"
        self._now = now
        self._begun = now()
        self._due = self._begun + (0.0 if self._changes else PLAIN_S)

    def __call__(self, watch: ProgressWatch) -> None:
        """Show how far the run has come, if it is time to."""
        if self._now() < self._due:
            return
        self._due = self._now() + (LOOK_S if self._changes else PLAIN_S)
        width = min(COLUMNS, shutil.get_terminal_size().columns - 1) if self._changes else COLUMNS
        line = fitted(self._head, ", ".join(self._parts(watch)), width)
        self._write(f"{_ERASE}{line}" if self._changes else f"{line}\n")

    def close(self) -> None:
        """Take away a line that changes."""
        if self._changes:
            self._write(_ERASE)

    def _write(self, text: str) -> None:
        try:
            self._out.write(text)
            self._out.flush()
        except (OSError, ValueError):
            # The reader has gone, or takes no such character; the run goes on without the line.
            self._due = math.inf

    def _parts(self, watch: ProgressWatch) -> Iterator[str]:
        passed_s, event, times_ms = self._now() - self._begun, watch.iteration, watch.times_ms
        if not times_ms:
            stage = "first iteration: " if watch.has_begun else _BEFORE
            yield f"{stage}{passed_s:.0f} s"
            return
        number = event.get("iteration", len(times_ms))
        yield f"{number}/{self._iterations}"
        if (loss := event.get("loss_text", event.get("loss"))) is not None:
            yield f"loss {loss}" if isinstance(loss, str) else f"loss {loss:.4g}"
        usual_ms = median(times_ms)
        yield f"{_ms(times_ms[-1])} ms (median {_ms(usual_ms)})"
        sides = {side: event.get(f"{side}_memory_bytes") for side in ("host", "device")}
        if held := [f"{side} {size / GIB:.1f}" for side, size in sides.items() if size]:
            yield f"{', '.join(held)} GiB"
        left_s = max(0, self._iterations - number) * usual_ms / 1000
        yield f"left {duration_text(left_s)}"
        if self._later_s is not None:
            yield f"sweep {duration_text(left_s + self._later_s)}"


def fitted(head: str, text: str, width: int) -> str:
    """Return ``HEAD: TEXT`` in so many characters; the head is cut first."""
    room = width - len(text) - 2
    if len(head) > room:
        head = f"{head[: max(0, room - 1)]}…"
    return f"{head}: {text}"[:width]


def _ms(milliseconds: float) -> str:
    return f"{milliseconds:.0f}" if milliseconds >= 100 else f"{milliseconds:.1f}"
