"""How far a long step is: one moving line on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TextIO

TERMINAL_INTERVAL_S = 0.5
LOG_INTERVAL_S = 10.0
MEGABYTE = 1e6


class Progress:
    """Tells rate and time left of work that is measured in bytes.

    Args:
        label: What is being done.
        total_bytes: Where it ends; None when nobody knows.
        begun_bytes: Where it starts, when an earlier run did some of it.
        stream: Where lines go; by default stderr.
        interval_s: Least time between lines; by default 0.5 on a terminal and 10 elsewhere.
    """

    def __init__(
        self,
        label: str,
        total_bytes: int | None,
        begun_bytes: int = 0,
        stream: TextIO | None = None,
        interval_s: float | None = None,
    ) -> None:
        self._label = label
        self._total = total_bytes
        self._begun = begun_bytes
        self._stream = stream or sys.stderr
        self._is_terminal = self._stream.isatty()
        default_s = TERMINAL_INTERVAL_S if self._is_terminal else LOG_INTERVAL_S
        self._interval_s = default_s if interval_s is None else interval_s
        self._started_s = self._told_s = time.monotonic()
        self._width = 0

    def update(self, done_bytes: int, note: str = "") -> None:
        """Say how far it is, unless that was said a moment ago."""
        now_s = time.monotonic()
        if now_s - self._told_s < self._interval_s:
            return
        self._told_s = now_s
        line = progress_line(
            self._label, done_bytes, self._total, self._begun, now_s - self._started_s
        )
        self._write(f"{line}, {note}" if note else line)

    def close(self) -> None:
        """Clear the moving line."""
        if self._is_terminal and self._width:
            self._stream.write("\r" + " " * self._width + "\r")
            self._stream.flush()

    def _write(self, line: str) -> None:
        if self._is_terminal:
            self._stream.write("\r" + line.ljust(self._width))
            self._width = len(line)
        else:
            self._stream.write(line + "\n")
        self._stream.flush()


def progress_line(
    label: str, done_bytes: int, total_bytes: int | None, begun_bytes: int, seconds: float
) -> str:
    """One line of progress; the rate counts only what this run did."""
    rate = (done_bytes - begun_bytes) / seconds if seconds > 0 else 0.0
    done = f"{done_bytes / MEGABYTE:,.1f}"
    if total_bytes is None:
        return f"{label}: {done} MB, {rate / MEGABYTE:,.1f} MB/s"
    share = 100 * done_bytes / total_bytes if total_bytes else 100.0
    left = duration((total_bytes - done_bytes) / rate) if rate > 0 else "unknown"
    return (
        f"{label}: {share:.0f}% of {total_bytes / MEGABYTE:,.1f} MB, "
        f"{rate / MEGABYTE:,.1f} MB/s, {left} left"
    )


def duration(seconds: float) -> str:
    """``1:02:03`` or ``2:03``."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
