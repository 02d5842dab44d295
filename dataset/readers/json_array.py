"""A file that is one JSON array, without holding it in memory."""

from __future__ import annotations

import codecs
import io
import json
from collections.abc import Iterator
from pathlib import Path

from dataset.errors import DatasetError
from dataset.readers.parse import MAX_DOCUMENT_BYTES, Piece, Place

READ_BYTES = 1 << 20
_SPACE = " \t\r\n"


def cut_array(path: Path, content: io.BufferedReader, start: Place, size: int) -> Iterator[Piece]:
    """Cut a JSON array into smaller arrays of about ``size`` characters each.

    Raises:
        DatasetError: It is not JSON, or not closed. Nothing after such a place can be trusted, so
            there is no skipping it.
    """
    elements: list[str] = []
    held = count = 0
    for count, element in enumerate(_elements(path, content), 1):
        if count <= start.offset:
            continue
        elements.append(element)
        held += len(element)
        if held >= size:
            yield _piece(elements, count)
            elements, held = [], 0
    if elements:
        yield _piece(elements, count)


def _piece(elements: list[str], count: int) -> Piece:
    data = f"[{','.join(elements)}]".encode()
    return Piece("json-array", data, count - len(elements) + 1, Place(count, count + 1))


class _Window:
    """The undecided part of the file, decoded."""

    def __init__(self, content: io.BufferedReader) -> None:
        self._content = content
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self.text = ""
        self.at = 0

    def more(self) -> bool:
        """Drop what was used and read on; False at the end of the file."""
        data = self._content.read(READ_BYTES)
        self.text = self.text[self.at :] + self._decoder.decode(data, final=not data)
        self.at = 0
        return bool(data)

    def skip_space(self) -> str:
        """The next character that is no white space, unread; empty at the end."""
        while True:
            while self.at < len(self.text) and self.text[self.at] in _SPACE:
                self.at += 1
            if self.at < len(self.text) or not self.more():
                return self.text[self.at : self.at + 1]


def _elements(path: Path, content: io.BufferedReader) -> Iterator[str]:
    """Text of each element, in order."""
    window, count = _Window(content), 0
    try:
        if window.skip_space() != "[":
            raise ValueError("it does not begin with [")
        window.at += 1
        if window.skip_space() != "]":
            while True:
                yield _next_element(window)
                count += 1
                mark = window.skip_space()
                window.at += 1
                if mark == "]":
                    break
                if mark != ",":
                    raise ValueError("neither , nor ] follows it" if mark else "the file ends")
        else:
            window.at += 1
        if window.skip_space():
            raise ValueError("something follows the closing ]")
    except ValueError as error:  # of JSON or of UTF-8
        raise DatasetError(
            f"{path}: not a JSON array after element {count}: {error}; mend it or write one "
            "object a line"
        ) from error


def _next_element(window: _Window) -> str:
    window.skip_space()
    decoder = json.JSONDecoder()
    while True:
        try:
            _, end = decoder.raw_decode(window.text, window.at)
        except json.JSONDecodeError:
            # Cut off here, or wrong: only more of the file can tell.
            if len(window.text) - window.at > MAX_DOCUMENT_BYTES or not window.more():
                raise
            continue
        if end == len(window.text) and window.more():
            continue  # a number could go on
        element = window.text[window.at : end]
        window.at = end
        return element
