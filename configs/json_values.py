"""JSON values one after another, wherever lines end: an array of documents, pretty-printed ones.

A file of JSON lines needs none of this. Here a value may stretch over lines and a line may hold
many, so a value's end is found by decoding it; no more of the file than a value is held.
"""

from __future__ import annotations

import codecs
import io
import json
import re
from collections.abc import Iterator
from typing import Any

_BETWEEN = re.compile(r"[\s,\[\]]*")
"""The brackets of an array and the commas between its values, one too many or too few as well."""
_NEXT_ON_A_LINE = re.compile(r"\n[ \t\r]*(?:,[ \t\r]*)?(?=\{)")
_NEXT_IN_A_LINE = re.compile(r"(?<=\})\s*,\s*(?=\{)")
_TAIL_CHARACTERS = 16
"""An error so near the end of what was read may come from the end alone."""
_OPEN_STRING = "Unterminated string"
_ONE_VALUE = json.JSONDecoder(parse_int=str, parse_float=str)
"""Numbers need no conversion here, which would refuse the longest."""


def begins_values(head: bytes) -> bool:
    """Return whether a file that begins so holds JSON values rather than one a line."""
    first, end, _ = head.removeprefix(codecs.BOM_UTF8).lstrip().partition(b"\n")
    line = first.rstrip()
    return line.startswith(b"[") or (bool(end) and (line == b"{" or line.endswith((b",", b"["))))


class TooLargeError(ValueError):
    """A value is larger than allowed; the message is the line where it begins."""


def values(
    stream: io.BufferedReader[Any], most: int, read_bytes: int
) -> Iterator[tuple[int, bytes]]:
    """Yield the values of a stream, those of an array one by one, as they are written.

    What is no JSON comes as it is too, up to the next object; who decodes it finds the error.

    Args:
        stream: Of UTF-8; bytes that are not are left as they are.
        most: Characters that a value may have.
        read_bytes: Bytes to read at once, at least.

    Yields:
        Line of the file where a value begins, from 1, and the value.

    Raises:
        TooLargeError: A value has more characters.
    """
    text = _Text(stream, most, read_bytes)
    while text.skip_between():
        end = text.end_of_value()
        yield text.line, text.take(end).encode(errors="surrogateescape")


class _Text:
    """The part of a stream that is held: from the value that is looked at on."""

    def __init__(self, stream: io.BufferedReader[Any], most: int, read_bytes: int) -> None:
        self._stream, self._most, self._read_bytes = stream, most, read_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")("surrogateescape")
        self._text, self._at, self._ended = "", 0, False
        self.line = 1

    def take(self, end: int) -> str:
        """Return what stands before a position, and go there."""
        taken = self._text[self._at : end]
        self.line += taken.count("\n")
        self._at = end
        return taken

    def skip_between(self) -> bool:
        """Go to the next value; returns False where there is none."""
        while True:
            found = _BETWEEN.match(self._text, self._at)
            self.take(found.end() if found else self._at)
            if self._at < len(self._text):
                return True
            if not self._read_more():
                return False

    def end_of_value(self) -> int:
        """Return the end of the value that begins here, or of what is none."""
        while True:
            try:
                end = _ONE_VALUE.raw_decode(self._text, self._at)[1]
                wrong = None
            except json.JSONDecodeError as error:
                end, wrong = (
                    len(self._text) if error.msg.startswith(_OPEN_STRING) else error.pos,
                    error.pos,
                )
            except RecursionError:
                end = wrong = self._at
            is_sure = self._ended or end < len(self._text) - _TAIL_CHARACTERS
            if wrong is None and (is_sure or end < len(self._text)):
                return end
            if is_sure and wrong is not None and (found := self._next_object(wrong)) is not None:
                return found
            if not self._read_more():
                return len(self._text)

    def _next_object(self, wrong: int) -> int | None:
        """Where an object begins behind a place that is no JSON; None if none does so far."""
        first = max(self._at + 1, self._text.rfind("\n", self._at, wrong))
        found = [
            _NEXT_ON_A_LINE.search(self._text, first),
            _NEXT_IN_A_LINE.search(self._text, max(wrong, self._at + 1)),
        ]
        return min((one.start() for one in found if one), default=None)

    def _read_more(self) -> bool:
        """Read at least as much again as is held; returns False at the end of the stream."""
        if self._ended:
            return False
        self._text, self._at = self._text[self._at :], 0
        if len(self._text) > self._most:
            raise TooLargeError(str(self.line))
        data = self._stream.read(max(self._read_bytes, len(self._text)))
        self._ended = not data
        self._text += self._decoder.decode(data, final=self._ended)
        return True
