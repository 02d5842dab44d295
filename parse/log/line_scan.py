"""The lines of a log that matter, found without looking at the others. Standard library alone.

A log is read in blocks, never whole. Each marker, a plain substring, is searched for in a whole
block at once, and only lines that hold one are cut out; so the time goes into searching memory, not
into a loop over lines.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import BinaryIO, NamedTuple

MAX_LINE_BYTES = 1 << 20
"""A longer line is not a line of a log; it is left out, and said."""
_BLOCK_BYTES = 1 << 22
_PROBE_BYTES = 400

_COLOUR = re.compile(rb"\x1b\[[0-9;]{0,20}[A-Za-z]")


class RawLine(NamedTuple):
    """One line that holds a marker."""

    number: int
    """Position in the file, from 1, counted as ``bytes.splitlines`` does."""
    kinds: int
    """Bits of the kinds of its markers."""
    text: bytes
    """Without its end, and with a space for every colour code."""
    before: bytes
    """The line before it, whatever it holds; empty where no marker's kind asks for it."""
    cut: bool
    """Whether the file ends inside the line."""
    overlong: bool
    """Whether the line is too long to be one; ``text`` is then only its beginning."""


def scan(file: BinaryIO, markers: Mapping[bytes, int], with_before: int) -> Iterator[RawLine]:
    """Lines that hold at least one of the markers, in order.

    Lines end at LF, CR LF or CR (a progress bar's); memory stays at a few blocks.

    Args:
        file: Open for reading, at its start.
        markers: Substrings and the bit of their kind; none holds an end of line.
        with_before: Bits of the kinds whose lines come with the line before them.
    """
    number, before, carry = 1, b"", b""
    while True:
        block = _read_block(file)
        data = carry + block
        end = data.rfind(b"\n") + 1 if block else len(data)
        if block and not end and len(data) > MAX_LINE_BYTES:
            yield RawLine(number, 0, data[:_PROBE_BYTES], b"", False, True)
            data, end = _skip_line(file), 0
            number, before, carry = number + 1, b"", data
            continue
        carry = data[end:]
        if end:
            whole = data[:end] if carry else data
            yield from _in_block(whole, markers, with_before, (number, before))
            number += data.count(b"\n", 0, end)
            before = data[data.rfind(b"\n", 0, end - 1) + 1 : end].rstrip(b"\n")
        if not block:
            return


def encoding_problem(file: BinaryIO) -> str:
    """Why the file is not text in ASCII or UTF-8; empty when nothing says so. Rewinds the file."""
    probe = file.read(_PROBE_BYTES)
    file.seek(0)
    zeros = max(probe[0::2].count(0), probe[1::2].count(0))
    if probe.startswith((b"\xff\xfe", b"\xfe\xff")) or (
        len(probe) > 8 and zeros * 5 > len(probe) * 2
    ):
        return "is UTF-16 text; convert it to UTF-8"
    return ""


def ends_mid_line(file: BinaryIO) -> bool:
    """Whether the file stops inside a line; leaves the file at its end."""
    if not file.seek(0, 2):
        return False
    file.seek(-1, 2)
    return file.read(1) not in (b"\n", b"\r")


def _read_block(file: BinaryIO) -> bytes:
    block = file.read(_BLOCK_BYTES)
    if b"\r" not in block:
        return block
    if block.endswith(b"\r"):  # its LF may be the next byte
        block += file.read(1)
    return block.replace(b"\r\n", b"\n").replace(b"\r", b"\n")


def _skip_line(file: BinaryIO) -> bytes:
    """Pass over the rest of a line; returns what was read beyond it."""
    while block := _read_block(file):
        _, end, rest = block.partition(b"\n")
        if end:
            return rest
    return b""


def _in_block(
    data: bytes, markers: Mapping[bytes, int], with_before: int, first: tuple[int, bytes]
) -> Iterator[RawLine]:
    """Marked lines of a block; ``first`` is its first line's number and the line before that."""
    ends: dict[int, int] = {}
    kinds: dict[int, int] = {}
    for marker, kind in markers.items():
        at = data.find(marker)
        while at >= 0:
            end = data.find(b"\n", at)
            if end < 0:
                end = len(data)
            start = data.rfind(b"\n", 0, at) + 1
            ends[start] = end
            kinds[start] = kinds.get(start, 0) | kind
            at = data.find(marker, end)
    number, before = first
    counted = 0
    for start in sorted(ends):
        number += data.count(b"\n", counted, start)
        counted, end, kind = start, ends[start], kinds[start]
        text = data[start : min(end, start + MAX_LINE_BYTES)]
        if b"\x1b" in text:
            text = _COLOUR.sub(b" ", text)
        if kind & with_before and start:
            before = data[data.rfind(b"\n", 0, start - 1) + 1 : start - 1]
        yield RawLine(number, kind, text, before, end == len(data), end - start > MAX_LINE_BYTES)
