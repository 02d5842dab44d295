"""All input files as one row of blocks for worker processes, and the texts in a block."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dataset.files import visible
from dataset.readers.inputs import InputFile
from dataset.readers.records import Form, SampleBy, opened, records

Bad = tuple[int, int, str]
"""Number of the file, line, reason."""


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


def parse(line: int, form: Form, content: Any, keys: Sequence[str]) -> Record | BadRecord:  # noqa: ANN401
    """Find the texts of a raw record; a plain text is that of the first key."""
    fields = content
    try:
        if form != "object":
            text = content.decode("utf-8-sig" if line == 1 else "utf-8")
            if form == "text":
                keys = keys[:1]
            fields = json.loads(text) if form == "json" else {keys[0]: text}
    except UnicodeDecodeError as error:
        return BadRecord(line, f"not UTF-8: {error.reason} at byte {error.start}")
    except (ValueError, RecursionError) as error:
        return BadRecord(line, f"not JSON: {error}")
    if not isinstance(fields, dict):
        return BadRecord(line, f"not an object but {type(fields).__name__}")
    for key in keys:
        if reason := _wrong(key, fields):
            return BadRecord(line, reason)
    values = {key: fields[key] for key in keys}
    return Record(line, fields, {k: v if isinstance(v, list) else [v] for k, v in values.items()})


def _wrong(key: str, fields: dict[str, Any]) -> str:
    """Why the value under a key is no text; empty when it is one."""
    if key not in fields:
        return f"no key '{key}'"
    value = fields[key]
    for sequence in value if isinstance(value, list) else [value]:
        if not isinstance(sequence, str):
            return f"'{key}' is not text but {type(sequence).__name__}"
        try:
            # isascii is free; only other text can hold half of a pair.
            sequence.isascii() or sequence.encode()
        except UnicodeEncodeError:
            return f"'{key}' holds half of a surrogate pair"
    return ""


@dataclass(frozen=True)
class Block:
    """What a worker takes at once."""

    number: int
    raw: list[tuple[int, int, Form, bytes | object]]
    """Number of the file, line, form and contents of each record."""
    consumed_bytes: int
    """Of the files on disk, up to the end of this block."""

    def records(self, keys: tuple[str, ...], bad: list[Bad]) -> Iterator[Record]:
        """Yield the records that can be used, and add the others to ``bad``."""
        for file, line, form, content in self.raw:
            found = parse(line, form, content, keys)
            if isinstance(found, BadRecord):
                bad.append((file, found.line, found.reason))
            else:
                yield found


@dataclass(frozen=True)
class Reading:
    """How the files are read; the same reading gives the same blocks."""

    files: tuple[InputFile, ...]
    keys: tuple[str, ...] = ("text",)
    sample_by: SampleBy = "document"
    block_bytes: int = 4 << 20
    """Text from which a block is full."""

    @property
    def total_bytes(self) -> int:
        """Of all files on disk."""
        return sum(file.size_bytes for file in self.files)

    def words(self, bad: Bad) -> str:
        """A record that cannot be used, as the user finds it."""
        file, line, reason = bad
        return f"{visible(str(self.files[file].path))}:{line}: {reason}"


def blocks(reading: Reading) -> Generator[Block, None, None]:
    """Yield all blocks; small files share one."""
    number = held_bytes = before = 0
    held: list[tuple[int, int, Form, bytes | object]] = []
    for index, file in enumerate(reading.files):
        with opened(file) as (stream, on_disk):
            for line, form, content, size in records(file, stream, reading.keys, reading.sample_by):
                held.append((index, line, form, content))
                held_bytes += size
                if held_bytes >= reading.block_bytes:
                    yield Block(number, held, before + min(on_disk.tell(), file.size_bytes))
                    number, held, held_bytes = number + 1, [], 0
        before += file.size_bytes
    if held:
        yield Block(number, held, before)
