"""How far a long step is: one moving line on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import io
import sys
from typing import Any, TextIO

from tqdm import tqdm  # type: ignore[import-untyped]

TERMINAL_INTERVAL_S = 0.5
LOG_INTERVAL_S = 10.0
MEGABYTE = 1e6


class Progress(tqdm):  # type: ignore[misc]  # it has no types
    """A bar over bytes; in a log, where nothing can be painted over, each state is a line.

    Args:
        label: What is being done.
        total_bytes: Where it ends.
        begun_bytes: Where it starts, when an earlier run did some of it; the rate leaves it out.
        stream: Where it goes; by default stderr.
    """

    monitor_interval = 0  # no thread of its own

    def __init__(
        self, label: str, total_bytes: int, begun_bytes: int = 0, stream: TextIO | None = None
    ) -> None:
        stream = stream or sys.stderr
        self._is_terminal = stream.isatty()
        interval_s = TERMINAL_INTERVAL_S if self._is_terminal else LOG_INTERVAL_S
        super().__init__(
            desc=label, total=total_bytes, initial=begun_bytes, file=stream, leave=False,
            unit="B", unit_scale=True, mininterval=interval_s, delay=interval_s,
        )  # fmt: skip

    def reach(self, done_bytes: int, note: str) -> None:
        """Say how far it is, unless that was said a moment ago."""
        self.set_postfix_str(note, refresh=False)
        self.update(done_bytes - self.n)

    def display(self, msg: str | None = None, pos: int | None = None) -> Any:  # noqa: ANN401 - tqdm's
        """Show a state, or on a terminal clear the line."""
        if self._is_terminal:
            return super().display(msg, pos)
        self.fp.write(f"{self}\n")
        return True

    def close(self) -> None:
        """Clear the line; in a log there is none to clear."""
        if not self._is_terminal:
            self.fp = io.StringIO()
        super().close()
