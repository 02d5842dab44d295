"""Where in a file something is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# A document and its ids must fit in memory several times over.
MAX_DOCUMENT_BYTES = 256 << 20

Format = Literal["json-lines", "json-array", "text", "text-lines", "paragraphs", "arrow"]


@dataclass(frozen=True)
class Place:
    """A place between two records of one file."""

    offset: int = 0
    """Bytes of decompressed text before it; elements or rows where there are no lines."""
    line: int = 1
    """Line that begins here; the element or row where there are no lines, from 1."""


@dataclass(frozen=True)
class Piece:
    """A stretch of one file, still unparsed."""

    form: Format
    data: bytes
    line: int
    """Number of its first line, element or row."""
    end: Place
