"""A finished part on disk: one file, complete or not there.

The first line is a record in JSON; the rest is, for each key in order, the lengths of its
sequences (int32), the sequences of each document (int32), and the ids.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataset.readers.blocks import Position
from dataset.readers.places import Place

ENDING = ".part"
UNFINISHED_ENDING = ".unfinished"
MOST_BAD_LISTED = 1000
COPY_BYTES = 1 << 22


@dataclass(frozen=True)
class Encoded:
    """Documents of one key."""

    lengths: NDArray[np.int32]  # (sequences,) as the index shall have them
    counts: NDArray[np.int32]  # (documents,) sequences of each
    ids: NDArray[Any]  # (tokens,) of the pair's id type

    def pieces(self) -> tuple[bytes, bytes, bytes]:
        """As they lie in the file."""
        return self.lengths.tobytes(), self.counts.tobytes(), self.ids.tobytes()


@dataclass(frozen=True)
class Facts:
    """What is known of a part."""

    number: int
    end: Position
    consumed_bytes: int
    """Of the input files on disk, up to the end of this part."""
    text_bytes: list[int]
    """Of the documents in UTF-8, by key."""
    empty: int
    """Records without text, left out."""
    num_bad: int
    """Records that cannot be used."""
    bad: list[tuple[int, int, str]]
    """The first of them: number of the file, line, reason."""
    seconds: dict[str, float]
    sizes: list[tuple[int, int, int]]
    """Bytes of lengths, counts and ids of each key."""
    checksum: int


def write(folder: Path, facts: dict[str, Any], keys: list[Encoded]) -> Facts:
    """Write a part; killed at any moment it leaves a whole one or none.

    Args:
        folder: The work folder.
        facts: All of `Facts` but sizes and checksum.
        keys: Documents of each key, in the keys' order.
    """
    pieces = [piece for encoded in keys for piece in encoded.pieces()]
    checksum = 0
    for piece in pieces:
        checksum = zlib.crc32(piece, checksum)
    sizes = [tuple(map(len, encoded.pieces())) for encoded in keys]
    full = Facts(**facts, sizes=sizes, checksum=checksum)  # type: ignore[arg-type]
    path = path_of(folder, full.number)
    unfinished = path.with_suffix(UNFINISHED_ENDING)
    with unfinished.open("wb") as file:
        file.write(json.dumps(asdict(full)).encode() + b"\n")
        file.writelines(pieces)
    unfinished.replace(path)
    return full


def path_of(folder: Path, number: int) -> Path:
    """Where a part lies."""
    return folder / f"{number:08}{ENDING}"


class Part:
    """A part on disk; nothing of it stays in memory."""

    def __init__(self, path: Path, key: int) -> None:
        """Look at the ``key``-th key of the part at ``path``."""
        facts, start = _read_facts(path)
        sizes = facts.sizes[key]
        self._path = path
        self._lengths_at = start + sum(map(sum, facts.sizes[:key]))
        self._counts_at = self._lengths_at + sizes[0]
        self._ids_at = self._counts_at + sizes[1]
        self._end = self._ids_at + sizes[2]

    def sequence_lengths(self) -> NDArray[np.int32]:
        """Tokens of each sequence."""
        return np.frombuffer(self._read(self._lengths_at, self._counts_at), np.int32)

    def sequences_per_document(self) -> NDArray[np.int32]:
        """How many sequences each document has."""
        return np.frombuffer(self._read(self._counts_at, self._ids_at), np.int32)

    def id_bytes(self) -> bytes:
        """The ids as they lie in ``.bin``."""
        return self._read(self._ids_at, self._end)

    def _read(self, start: int, end: int) -> bytes:
        with self._path.open("rb") as file:
            file.seek(start)
            return file.read(end - start)


def finished(folder: Path) -> Iterator[Facts]:
    """The whole parts of a work folder, by number; what is damaged is as good as not there."""
    for path in sorted(folder.glob(f"*{ENDING}")):
        facts = _checked(path)
        if facts is not None:
            yield facts


def _checked(path: Path) -> Facts | None:
    try:
        facts, start = _read_facts(path)
    except (ValueError, KeyError, TypeError):
        return None
    checksum = left = 0
    with path.open("rb") as file:
        file.seek(start)
        while data := file.read(COPY_BYTES):
            checksum = zlib.crc32(data, checksum)
            left += len(data)
    is_whole = left == sum(map(sum, facts.sizes)) and checksum == facts.checksum
    return facts if is_whole and path == path_of(path.parent, facts.number) else None


def _read_facts(path: Path) -> tuple[Facts, int]:
    """The record, and where the body starts."""
    with path.open("rb") as file:
        line = file.readline()
    values = json.loads(line)
    end = values.pop("end")
    values["bad"] = [tuple(one) for one in values["bad"]]
    values["sizes"] = [tuple(one) for one in values["sizes"]]
    return Facts(end=Position(end["file"], Place(**end["place"])), **values), len(line)
