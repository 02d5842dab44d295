"""DeepSpeed's ``memory_breakdown``: a title, a line of the device, a line of the host.

Standard library alone. DeepSpeed prints GiB and calls them GB.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

_NUMBER = rb"(\d{1,9}(?:\.\d{1,6})?)"
_DEVICE = re.compile(
    rb"\bMA " + _NUMBER + rb" GB\s+Max_MA " + _NUMBER + rb" GB\s+CA " + _NUMBER
    + rb" GB\s+Max_CA " + _NUMBER + rb" GB(?!\w)"
)  # fmt: skip
_HOST = re.compile(
    rb"CPU Virtual Memory:\s+used = " + _NUMBER + rb" GB, percent = " + _NUMBER + rb"%"
)
_WRITER = b"see_memory_usage] "
_NOT_A_TITLE = (b"time (ms)", b"elapsed", b"<TIMER", b" GB ", b"CPU Virtual", b", skipped=", b"] [")
_TITLE_CHARACTERS = 120
_LINES_APART = 4
"""Lines of other ranks that may stand between the line of the device and that of the host."""
_FEWEST = 3
"""Lines below which nobody can tell which of them is wrong."""
_ROUNDING_GIB = 0.011
_WHOLE_ROUNDING_GIB = 0.511
"""``Max_CA`` is printed as a whole number."""
_ROUNDING_PERCENT = 0.06


@dataclass(slots=True)
class MemoryLine:
    """What one call of DeepSpeed's ``see_memory_usage`` printed; None where it cannot be read."""

    line: int
    """Position of its first line of figures in the log, from 1."""
    window: int
    """How many iteration lines stand before it."""
    title: str | None = None
    """Where in the program, as printed: ``Engine before forward``."""
    allocated_gib: float | None = None
    max_allocated_gib: float | None = None
    cached_gib: float | None = None
    max_cached_gib: float | None = None
    host_used_gib: float | None = None
    """Memory in use on the machine, by all of its processes."""
    host_percent: float | None = None
    """The same as a share of the machine's memory, from 0 to 100."""
    after_timers: bool = False
    """Whether DeepSpeed had printed timers in the window before it."""
    iteration: int | None = None
    """The iteration it was printed in; None before the first forward and where it is unknown."""


class MemoryReader:
    """Collects memory lines; a line of the device waits for the host's that follows it."""

    def __init__(self, reject: Callable[[int, str, bytes], None]) -> None:
        self.lines: list[MemoryLine] = []
        self._reject = reject
        self._pending: MemoryLine | None = None
        self._floats: dict[bytes, float] = {}
        self._titles: dict[bytes, str | None] = {}

    def add(self, number: int, text: bytes, before: bytes, window: int, late: bool) -> None:
        """Take one line that looks like memory; both lines may be glued together in it.

        Args:
            number: Position of the line in the log.
            text: The line.
            before: The line before it, which may be its title.
            window: How many iteration lines stand before it.
            late: Whether timers of the window stand before it.
        """
        device = _DEVICE.search(text)
        if device:
            self.flush()
            figures = [self._float(value) for value in device.groups()]
            line = MemoryLine(number, window, self._title(before, text), after_timers=late)
            if _possible(*figures):
                line.allocated_gib, line.max_allocated_gib = figures[:2]
                line.cached_gib, line.max_cached_gib = figures[2:]
            else:  # which of them is wrong is unknown
                self._reject(number, "memory figures that contradict each other", text)
            self._pending = line
        elif b"Max_MA" in text:
            self.flush()
            self._reject(number, "a damaged memory line", text)
            self._pending = MemoryLine(number, window)
        if b"CPU Virtual" in text:
            self._add_host(number, text, window)

    def _add_host(self, number: int, text: bytes, window: int) -> None:
        line = self._pending
        if line is None or line.window != window or number - line.line > _LINES_APART:
            self.flush()
            line = self._pending = MemoryLine(number, window)
        host = _HOST.search(text)
        if host:
            line.host_used_gib, line.host_percent = self._float(host[1]), self._float(host[2])
        else:
            self._reject(number, "a damaged memory line", text)
        self.flush()

    def flush(self) -> None:
        """Take the pending line as it is: nothing more belongs to it."""
        if self._pending:
            self.lines.append(self._pending)
            self._pending = None

    def move_to_first_window(self) -> None:
        """All that was collected so far is of the first window."""
        self.flush()
        for line in self.lines:
            line.window = 0

    def _float(self, text: bytes) -> float:
        value = self._floats.get(text)
        if value is None:
            value = self._floats[text] = float(text)
        return value

    def _title(self, before: bytes, text: bytes) -> str | None:
        """The title that the line before prints; None when that is not a title's line."""
        _, writer, rest = before.rpartition(_WRITER)
        if not writer:
            if _WRITER in text:
                return None
            lead = text[: text.find(b"MA ")]
            rest = before[len(lead) :] if lead and before.startswith(lead) else before
            if any(marker in rest for marker in _NOT_A_TITLE):
                return None
        if rest not in self._titles:
            self._titles[rest] = _shown(rest)
        return self._titles[rest]


def check_host(lines: Sequence[MemoryLine]) -> None:
    """Drop host figures whose share does not fit the size of the machine that the others give."""
    known = [m for m in lines if m.host_used_gib and m.host_percent]
    if len(known) < _FEWEST:
        return
    size = median((m.host_used_gib or 0.0) / (m.host_percent or 1.0) * 100 for m in known)
    unsure = median(_ROUNDING_PERCENT / (m.host_percent or 1.0) for m in known)

    def fits(line: MemoryLine) -> bool:
        expected = size * (line.host_percent or 0.0) / 100
        slack = expected * unsure + size * _ROUNDING_PERCENT / 100 + _ROUNDING_GIB
        return abs((line.host_used_gib or 0.0) - expected) <= slack

    wrong = [line for line in known if not fits(line)]
    if 4 * len(wrong) <= len(known):
        for line in wrong:
            line.host_used_gib = line.host_percent = None


def _possible(allocated: float, peak: float, cached: float, cached_peak: float) -> bool:
    return (
        allocated <= peak + _ROUNDING_GIB
        and allocated <= cached + _ROUNDING_GIB
        and cached <= cached_peak + _WHOLE_ROUNDING_GIB
        and peak <= cached_peak + _WHOLE_ROUNDING_GIB
    )


def _shown(text: bytes) -> str | None:
    title = text.decode(errors="replace").strip()
    if not title or len(title) > _TITLE_CHARACTERS or not title.isprintable():
        return None
    return None if "\ufffd" in title else title
