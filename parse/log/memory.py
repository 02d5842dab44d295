"""DeepSpeed's ``memory_breakdown``: a title, a line of the device, a line of the host.

Standard library alone. DeepSpeed prints GiB and calls them GB.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from statistics import median

from parse.log.records import MemoryLine
from parse.log.windows import AFTER_STEP, Window

RejectLine = Callable[[int, str, str], None]
"""Lists a line that is left out: its number, the reason, its text."""

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
_FIRST_TITLE = "Engine before forward"
"""What comes before it is the setup."""
_TITLES = {
    _FIRST_TITLE,
    *("Engine after forward", "Engine before backward", "Engine after backward"),
    *("Engine before step", AFTER_STEP),
}


class MemoryReader:
    """Reads memory lines; a line of the device waits for the host's that follows it."""

    def __init__(self, reject: RejectLine) -> None:
        self.lines: list[MemoryLine] = []
        self._reject = reject
        self._pending: MemoryLine | None = None

    def add(self, number: int, text: str, before: str) -> list[MemoryLine]:
        """Take one line that looks like memory.

        Args:
            number: Position of the line in the log.
            text: The line.
            before: The line before it, which may be its title.

        Returns:
            The record that begins with this line; none where it goes on with the one before.
        """
        is_host, pending = "CPU Virtual" in text, self._pending
        goes_on = is_host and pending and number - pending.line <= _LINES_APART
        line = pending if goes_on and pending else MemoryLine(number)
        self._pending = None if is_host else line
        found = (_HOST if is_host else _DEVICE).search(text)
        figures = [float(value) for value in found.groups()] if found else []
        if not found:
            self._reject(number, "a damaged memory line", text)
        elif is_host:
            line.host_used_gib, line.host_percent = figures
        elif _possible(*figures):
            line.title = _title(before, text)
            line.allocated_gib, line.max_allocated_gib = figures[:2]
            line.cached_gib, line.max_cached_gib = figures[2:]
        else:
            self._reject(number, "memory figures that contradict each other", text)
        if goes_on:
            return []
        self.lines.append(line)
        return [line]

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


def check_host(lines: Sequence[MemoryLine], reject: RejectLine) -> None:
    """Drop host figures whose share does not fit the size of the machine that the others give."""
    known = [(m, m.host_used_gib, m.host_percent) for m in lines]
    sure = [(m, used, percent) for m, used, percent in known if used and percent]
    if len(sure) < _FEWEST:
        return
    size_gib = median(used / percent * 100 for _, used, percent in sure)
    unsure = median(_ROUNDING_PERCENT / percent for *_, percent in sure)
    wrong = []
    for line, used, percent in sure:
        expected = size_gib * percent / 100
        slack = expected * unsure + size_gib * _ROUNDING_PERCENT / 100 + _ROUNDING_GIB
        wrong += [line] if abs(used - expected) > slack else []
    for line in wrong if 4 * len(wrong) <= len(sure) else ():
        line.host_used_gib = line.host_percent = None
        reject(line.line, "host memory that does not fit the machine's size", "")


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
    figures = [(line.max_allocated_gib, line.host_used_gib) for line in window.memory]
    device, host = (None if None in side else max(side) for side in zip(*figures, strict=True))
    return device, host
