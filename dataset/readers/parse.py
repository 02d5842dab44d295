"""Pieces of a file, and their records."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

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


@dataclass(frozen=True)
class Record:
    """One record: an object of JSON, a row, a text."""

    line: int
    fields: dict[str, Any]
    texts: dict[str, list[str]]
    """By key: the document's sequences, one unless the file has it split into sentences."""


@dataclass(frozen=True)
class BadRecord:
    """A record that cannot be used."""

    line: int
    reason: str


def parse(piece: Piece, keys: Sequence[str]) -> Iterator[Record | BadRecord]:
    """Yield the records of a piece; blank lines are none."""
    if piece.form == "json-lines":
        for line, raw in enumerate(piece.data.split(b"\n"), piece.line):
            if raw and not raw.isspace():
                yield _json_record(line, raw, keys)
        return
    if piece.form == "json-array":
        for line, fields in enumerate(json.loads(piece.data), piece.line):
            yield _checked(line, fields, keys)
        return
    if piece.form == "arrow":
        yield from _rows(piece, keys)
        return
    for line, raw in _texts(piece):
        try:
            text = raw.decode("utf-8-sig" if line == 1 else "utf-8")
        except UnicodeDecodeError as error:
            yield BadRecord(line, f"not UTF-8: {error.reason} at byte {error.start}")
        else:
            yield _checked(line, dict.fromkeys(keys[:1], text), keys[:1])


def _json_record(line: int, raw: bytes, keys: Sequence[str]) -> Record | BadRecord:
    try:
        text = raw.decode("utf-8-sig" if line == 1 else "utf-8")
        fields = json.loads(text)
    except UnicodeDecodeError as error:
        return BadRecord(line, f"not UTF-8: {error.reason} at byte {error.start}")
    except (ValueError, RecursionError) as error:
        return BadRecord(line, f"not JSON: {error}")
    return _checked(line, fields, keys)


def _checked(line: int, fields: Any, keys: Sequence[str]) -> Record | BadRecord:  # noqa: ANN401
    if not isinstance(fields, dict):
        return BadRecord(line, f"not an object but {type(fields).__name__}")
    texts: dict[str, list[str]] = {}
    for key in keys:
        if key not in fields:
            return BadRecord(line, f"no key '{key}'")
        value = fields[key]
        sequences = value if isinstance(value, list) else [value]
        for sequence in sequences:
            if not isinstance(sequence, str):
                return BadRecord(line, f"'{key}' is not text but {type(sequence).__name__}")
            # isascii is free; only other text can hold half of a pair.
            if not sequence.isascii() and not _is_encodable(sequence):
                return BadRecord(line, f"'{key}' holds half of a surrogate pair")
        texts[key] = sequences
    return Record(line, fields, texts)


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _texts(piece: Piece) -> Iterator[tuple[int, bytes]]:
    if piece.form == "text":
        if not piece.data.isspace():
            yield 1, piece.data
        return
    held: list[bytes] = []
    for line, raw in enumerate(piece.data.split(b"\n"), piece.line):
        is_blank = not raw or raw.isspace()
        if piece.form == "text-lines":
            if not is_blank:
                yield line, raw.removesuffix(b"\r")
        elif not is_blank:
            held.append(raw)
        elif held:
            yield line - len(held), b"\n".join(held)
            held = []
    if held:
        yield line - len(held) + 1, b"\n".join(held)


def _rows(piece: Piece, keys: Sequence[str]) -> Iterator[Record | BadRecord]:
    import pyarrow as pa

    table = pa.ipc.open_stream(piece.data).read_all()
    for line, fields in enumerate(table.to_pylist(), piece.line):
        yield _checked(line, fields, keys)
