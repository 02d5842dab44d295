"""Memory as DeepSpeed's ``see_memory_usage`` prints it: a title, then the device's, the host's.

Lines of other ranks and programs stand between these three, and several ranks may print theirs at
the same time. A figure gets the title that was written for it, or none.
"""

from __future__ import annotations

import re
from collections import deque
from typing import Any, NamedTuple

from parse.lines import Line

_WRITER = "see_memory_usage] "
_APART = 40
"""Lines of others that may stand between lines that belong together."""
_FIGURES = re.compile(r"\bMA \d|\bCPU Virtual Memory:")
_NEXT_RECORD = re.compile(r"\[\d{4}-\d\d-\d\d|<TIMER|\btime \(ms\)")
"""What was printed in the same line without an end of the one before."""
_BAR = re.compile(r".*\d+/(?:\d+|\?) \[[^\]]*\]|.*\[[\d:]+<[^\]]*\]")
_OF_A_TIME = re.compile(
    r"(?i)\b(?:before|after|begin|beginning|start|end|pre|post|during|engine|stage)\b"
)
"""A word that titles have: they say when memory was looked at."""
_NO_TITLE = re.compile(
    r"^\[|[|<>]|\d%|\bGB\b|\] \[|https?:|elapsed|\.py\b|\d{4}-\d\d|(?i:warning|error)|[.!]$"
)
_MOST_CHARACTERS = 120


class _Title(NamedTuple):
    line: int
    source: str
    text: str


class Titles:
    """Knows which title the next figures belong to."""

    def __init__(self) -> None:
        self._written: deque[_Title] = deque(maxlen=_APART)
        self._before = ""

    def feed(self, line: Line) -> None:
        """Take a line that holds no figures."""
        self._before = line.text
        if _WRITER in line.text:
            self._take_written(line)

    def of_figures(self, line: Line) -> str | None:
        """Return the title of a line with the device's figures; None where it is not known."""
        before, self._before = self._before, ""
        if _WRITER not in line.text:
            return _plain(before, line.text)
        self._take_written(line)
        near = [one for one in self._written if line.number - one.line <= _APART]
        own = [one for one in near if one.source == line.source] or near
        is_next = bool(own) and line.number - own[-1].line <= 1
        if is_next:  # the figures of other titles are lost
            lost = [one for one in own if one.text != own[-1].text]
            near = [one for one in near if one not in lost]
        is_sure = is_next or len({one.text for one in own}) == 1
        if is_sure:
            near.remove(own[-1])
        self._written = deque(near, maxlen=_APART)
        return own[-1].text if is_sure else None

    def _take_written(self, line: Line) -> None:
        for part in line.text.split(_WRITER)[1:]:
            title = _NEXT_RECORD.split(part)[0].strip()
            if not _FIGURES.search(part) and _can_be_title(title):
                self._written.append(_Title(line.number, line.source, title))


def _can_be_title(title: str) -> bool:
    return title.isprintable() and 0 < len(title) <= _MOST_CHARACTERS


def _plain(before: str, text: str) -> str | None:
    """The title in the line before, where lines do not say who wrote them."""
    figures = _FIGURES.search(text)
    prefix = text[: figures.start()] if figures else ""
    # What comes before is the same in both lines but for the time of day.
    same = re.match(re.sub(r"\d+", r"\\d+", re.escape(prefix)), before)
    title = _BAR.sub("", before[same.end() if same else 0 :]).strip()
    is_title = _can_be_title(title) and _OF_A_TIME.search(title) and not _NO_TITLE.search(title)
    return title if is_title else None


class Pairs:
    """Joins the host's figures to those of the device."""

    def __init__(self) -> None:
        self._open: list[tuple[Line, dict[str, Any]]] = []

    def add_device(self, line: Line, row: dict[str, Any]) -> None:
        """Take a row of the device's figures."""
        self._open.append((line, row))

    def of_host(self, line: Line) -> dict[str, Any] | None:
        """Return the row that the host's figures belong to; None where there is none."""
        self._open = [one for one in self._open if line.number - one[0].number <= _APART]
        for place, (device, row) in enumerate(self._open):
            if device.source == line.source:
                del self._open[place]
                return row
        return None
