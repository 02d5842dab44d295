"""How far the running point is: a line that renews itself on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import shutil
import sys
import threading
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from configs.files import printable
from launch.process.watch import GrowingFile, iteration_event, meanwhile
from launch.records.run_folder import RunFolder

TERMINAL_S = 1.0
"""Seconds between two looks on a terminal."""
PLAIN_S = 60.0
"""Seconds between two lines elsewhere."""


class Tail:
    """The newest iteration of a growing ``metrics.jsonl``, read piece by piece."""

    def __init__(self, path: Path) -> None:
        self._file = GrowingFile(path)
        self._newest: dict[str, Any] | None = None

    def look(self) -> dict[str, Any] | None:
        """Return the fields of the newest iteration."""
        for line in self._file.new_lines():
            self._newest = iteration_event(line) or self._newest
        return self._newest


def progress_text(newest: dict[str, Any] | None, iterations: int) -> str:
    """Return ``iteration 7 of 20, 0.25 s each, loss 8.123``; says so before the first."""
    if newest is None:
        return "starting"
    loss, took_ms = newest.get("loss"), newest.get("iteration_ms")
    parts = [f"iteration {newest.get('iteration')} of {iterations}"]
    if isinstance(took_ms, int | float):
        parts.append(f"{took_ms / 1000:.3g} s each")
    is_number = isinstance(loss, int | float)
    parts.append(f"loss {loss:.4f}" if is_number else f"loss {newest.get('loss_text', 'none')}")
    return ", ".join(parts)


def duration_text(seconds: float) -> str:
    """Return ``45 s``, ``12 min``, ``3 h 20 min``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min"


@dataclass(frozen=True)
class Live:
    """Shows the progress of one run after the other."""

    head: str
    """``[3/12] tiny vanilla``."""
    iterations: int
    """Iterations of the run."""
    others_s: float | None
    """Seconds that the points after it will take, as far as can be told."""
    point_s: float | None
    """The same of this one."""

    def watch(self, folder: RunFolder) -> AbstractContextManager[None]:
        """Show progress until the block ends."""
        return meanwhile(partial(self._show, folder))

    def _show(self, folder: RunFolder, ended: threading.Event) -> None:
        started, tail = time.monotonic(), Tail(folder.metrics)
        on_terminal = sys.stdout.isatty()
        while not ended.wait(TERMINAL_S if on_terminal else PLAIN_S):
            text = printable(self.text(tail.look(), time.monotonic() - started))
            width = shutil.get_terminal_size().columns
            _write(f"\r\x1b[K{text[: width - 1]}" if on_terminal else f"{text}\n")
        if on_terminal:
            _write("\r\x1b[K")

    def text(self, newest: dict[str, Any] | None, seconds: float) -> str:
        """Return the line of this moment."""
        line = f"{self.head}: {progress_text(newest, self.iterations)}"
        if self.others_s is None or self.point_s is None:
            return line
        left_s = self.others_s + max(0.0, self.point_s - seconds)
        return f"{line}; the sweep needs about {duration_text(left_s)} more"


def _write(text: str) -> None:
    with contextlib.suppress(OSError):
        sys.stdout.write(text)
        sys.stdout.flush()
