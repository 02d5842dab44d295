"""The lines of a log file, one at a time. Standard library alone."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, cast

MAX_LINE_CHARACTERS = 1 << 20
"""A longer line is not a line of a log."""
_PROBE_BYTES = 400
_COLOUR = re.compile(r"\x1b\[[0-9;]{0,20}[A-Za-z]")


class Line(NamedTuple):
    """One line of a log."""

    number: int
    """Position in the file, from 1."""
    text: str
    """Without its end, and with a space for every colour code."""
    cut: bool
    """Whether the file ends inside the line."""
    overlong: bool
    """Whether the line is too long to be one; ``text`` is then only its beginning."""


def open_log(path: Path) -> io.TextIOWrapper:
    """Open a log; lines end at LF, CR LF or CR (a progress bar's)."""
    return path.open(encoding="utf-8", errors="replace")


def read_lines(file: io.TextIOWrapper) -> Iterator[Line]:
    """Yield the lines of a file, never holding more than one."""
    number = 0
    while text := file.readline(MAX_LINE_CHARACTERS):
        number += 1
        end, overlong = text, len(text) == MAX_LINE_CHARACTERS and not text.endswith("\n")
        while overlong and end and not end.endswith("\n"):
            end = file.readline(MAX_LINE_CHARACTERS)
        if "\x1b" in text:
            text = _COLOUR.sub(" ", text)
        yield Line(number, text.removesuffix("\n"), not end.endswith("\n"), overlong)


def encoding_problem(file: io.TextIOWrapper) -> str:
    """Say why the file is not text in ASCII or UTF-8; empty when its beginning looks like it.

    The file stays at its start, so a pipe can be read as well.
    """
    probe = cast(io.BufferedReader, file.buffer).peek(_PROBE_BYTES)[:_PROBE_BYTES]
    zeros = max(probe[0::2].count(0), probe[1::2].count(0))
    if probe.startswith((b"\xff\xfe", b"\xfe\xff")) or (
        len(probe) > 8 and zeros * 5 > len(probe) * 2
    ):
        return "is UTF-16 text; convert it to UTF-8"
    return ""
