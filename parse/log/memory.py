"""DeepSpeed's ``memory_breakdown``: a title, a line of the device, a line of the host.

Standard library alone. DeepSpeed prints GiB and calls them GB.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from statistics import median

from parse.log.records import MemoryLine
from parse.log.windows import AFTER_STEP, Window

_NUMBER = r"(\d{1,9}(?:\.\d{1,6})?)"
_DEVICE = re.compile(
    rf"\bMA {_NUMBER} GB\s+Max_MA {_NUMBER} GB\s+CA {_NUMBER} GB\s+Max_CA {_NUMBER} GB(?!\w)"
)
_HOST = re.compile(rf"CPU Virtual Memory:\s+used = {_NUMBER} GB, percent = {_NUMBER}%")
_WRITER = "see_memory_usage] "
_NOT_A_TITLE = ("time (ms)", "elapsed", "<TIMER", " GB ", "CPU Virtual", ", skipped=", "] [")
_TITLE_CHARACTERS = 120
_LINES_APART = 4
"""Lines of other ranks that may stand between the line of the device and that of the host."""
_FEWEST = 3
"""With fewer lines than this, the machine's size cannot be told from them."""
_ROUNDING_GIB = 0.011
_WHOLE_ROUNDING_GIB = 0.511
"""``Max_CA`` is printed as a whole number."""
_ROUNDING_PERCENT = 0.06
_DAMAGED = "a damaged memory line"
_FIRST_TITLE = "Engine before forward"
"""What comes before it is the setup."""
_TITLES = {
    _FIRST_TITLE,
    *("Engine after forward", "Engine before backward", "Engine after backward"),
    *("Engine before step", AFTER_STEP),
}


class MemoryReader:
    """Reads memory lines; a line of the device waits for the host's that follows it."""

    def __init__(self, reject: Callable[[int, str, str], None]) -> None:
        self.lines: list[MemoryLine] = []
        self._reject = reject
        self._pending: MemoryLine | None = None

    def add(self, number: int, text: str, before: str) -> MemoryLine | None:
        """Take one line that looks like memory.

        Args:
            number: Position of the line in the log.
            text: The line.
            before: The line before it, which may be its title.

        Returns:
            The record that begins with this line; None where it goes on with the one before.
        """
        if "CPU Virtual" in text:
            return self._add_host(number, text)
        line = self._begin(number)
        device = _DEVICE.search(text)
        figures = [float(value) for value in device.groups()] if device else []
        if device and _possible(*figures):
            line.title = _title(before, text)
            line.allocated_gib, line.max_allocated_gib = figures[:2]
            line.cached_gib, line.max_cached_gib = figures[2:]
        else:
            reason = "memory figures that contradict each other" if device else _DAMAGED
            self._reject(number, reason, text)
        self._pending = line
        return line

    def _add_host(self, number: int, text: str) -> MemoryLine | None:
        line = self._pending
        is_new = line is None or number - line.line > _LINES_APART
        if line is None or is_new:
            line = self._begin(number)
        host = _HOST.search(text)
        if host:
            line.host_used_gib, line.host_percent = float(host[1]), float(host[2])
        else:
            self._reject(number, _DAMAGED, text)
        self._pending = None
        return line if is_new else None

    def _begin(self, number: int) -> MemoryLine:
        self.lines.append(MemoryLine(number))
        return self.lines[-1]

    def end_pair(self) -> None:
        """Note that a line of the host which follows is not the pending one's."""
        self._pending = None


def _possible(allocated: float, peak: float, cached: float, cached_peak: float) -> bool:
    return (
        allocated <= peak + _ROUNDING_GIB
        and allocated <= cached + _ROUNDING_GIB
        and cached <= cached_peak + _WHOLE_ROUNDING_GIB
        and peak <= cached_peak + _WHOLE_ROUNDING_GIB
    )


def _title(before: str, text: str) -> str | None:
    """The title that the line before prints; None when that is not a title's line."""
    _, writer, title = before.rpartition(_WRITER)
    if not writer:
        lead = text[: text.find("MA ")]
        title = before.removeprefix(lead)
        if _WRITER in text or any(marker in title for marker in _NOT_A_TITLE):
            return None
    title = title.strip()
    readable = title.isprintable() and "\ufffd" not in title
    return title if readable and 0 < len(title) <= _TITLE_CHARACTERS else None


def check_host(lines: Sequence[MemoryLine]) -> list[MemoryLine]:
    """Drop host figures whose share does not fit the size of the machine that the others give.

    Returns:
        The lines whose figures were dropped.
    """
    known = [m for m in lines if m.host_used_gib and m.host_percent]
    if len(known) < _FEWEST:
        return []
    size = median((m.host_used_gib or 0.0) / (m.host_percent or 1.0) * 100 for m in known)
    unsure = median(_ROUNDING_PERCENT / (m.host_percent or 1.0) for m in known)

    def fits(line: MemoryLine) -> bool:
        expected = size * (line.host_percent or 0.0) / 100
        slack = expected * unsure + size * _ROUNDING_PERCENT / 100 + _ROUNDING_GIB
        return abs((line.host_used_gib or 0.0) - expected) <= slack

    wrong = [line for line in known if not fits(line)]
    if 4 * len(wrong) > len(known):
        return []
    for line in wrong:
        line.host_used_gib = line.host_percent = None
    return wrong


def number_memory(windows: Sequence[Window], lines: Sequence[MemoryLine]) -> None:
    """Set the iteration of the memory lines of numbered windows; those of the setup have none."""
    setup_end = next((line.line for line in lines if line.title == _FIRST_TITLE), 0)
    for window in windows:
        for line in window.memory if window.is_whole else ():
            # Without an iteration line, only the titles tell an iteration's lines from others.
            known = window.line or line.title in _TITLES
            if line.line >= setup_end and known:
                line.iteration = window.iteration


def largest_gib(window: Window) -> tuple[float | None, float | None]:
    """The largest figures of a window's device and host; None where one of them is missing."""
    if not window.is_whole or not window.memory:
        return None, None
    device = [line.max_allocated_gib for line in window.memory]
    host = [line.host_used_gib for line in window.memory]
    return _largest(device), _largest(host)


def _largest(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return max(known) if len(known) == len(values) else None
