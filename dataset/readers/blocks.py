"""All input files as one row of blocks, from any block's end."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass, field

from dataset.readers.inputs import InputFile
from dataset.readers.parse import Piece, Place
from dataset.readers.pieces import SampleBy, cut, cut_rows
from dataset.readers.streams import opened

# Small files are put together until a block is this share of its size.
FULL_SHARE = 0.5


@dataclass(frozen=True)
class Position:
    """A place between two records of all files."""

    file: int = 0
    """Number of the file, from 0."""
    place: Place = field(default_factory=Place)


@dataclass(frozen=True)
class Block:
    """What a worker takes at once."""

    number: int
    pieces: tuple[tuple[int, Piece], ...]  # number of the file, and a stretch of it
    end: Position
    consumed_bytes: int
    """Of the files on disk, up to the end of this block."""


@dataclass(frozen=True)
class Reading:
    """How the files are read; the same reading gives the same blocks."""

    files: tuple[InputFile, ...]
    keys: tuple[str, ...] = ("text",)
    sample_by: SampleBy = "document"
    block_bytes: int = 4 << 20

    @property
    def total_bytes(self) -> int:
        """Of all files on disk."""
        return sum(file.size_bytes for file in self.files)

    def name(self, file: int) -> str:
        """Name of a file by its number."""
        return str(self.files[file].path)


def blocks(
    reading: Reading, number: int = 0, start: Position | None = None
) -> Generator[Block, None, None]:
    """Yield the blocks from ``start``, the first of them called ``number``."""
    begin = start or Position()
    held: list[tuple[int, Piece]] = []
    held_bytes = 0
    end, consumed = begin, 0
    for end, consumed, piece in _pieces(reading, begin):
        if piece is not None:
            held.append((end.file, piece))
            held_bytes += len(piece.data)
        if held_bytes >= FULL_SHARE * reading.block_bytes:
            yield Block(number, tuple(held), end, consumed)
            number, held, held_bytes = number + 1, [], 0
    if held:
        yield Block(number, tuple(held), end, consumed)


def _pieces(reading: Reading, begin: Position) -> Iterator[tuple[Position, int, Piece | None]]:
    """Pieces with the position after each and the bytes on disk consumed by then."""
    before = sum(file.size_bytes for file in reading.files[: begin.file])
    for number in range(begin.file, len(reading.files)):
        file = reading.files[number]
        start = begin.place if number == begin.file else Place()
        for consumed, piece in _pieces_of(file, start, reading):
            yield Position(number, piece.end), before + min(consumed, file.size_bytes), piece
        before += file.size_bytes


def _pieces_of(file: InputFile, start: Place, reading: Reading) -> Iterator[tuple[int, Piece]]:
    if file.kind == "parquet":
        for piece in cut_rows(file, start, reading.block_bytes, reading.keys):
            yield 0, piece
        return
    with opened(file) as stream:
        for piece in cut(file, stream, start, reading.block_bytes, reading.sample_by):
            yield stream.consumed_bytes(), piece
