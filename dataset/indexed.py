"""Megatron's ``.bin``/``.idx`` pair: written and read by numpy alone.

``.bin`` is every token id, one after the other. ``.idx`` is a header, then the length of every
sequence (int32), its byte offset in ``.bin`` (int64), and the sequence number at which each
document begins, closed by the total (int64). The bytes are those of megatron-core's
``IndexedDatasetBuilder``, which keeps all lengths in a list and needs torch.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataset.files import DatasetError, writing

HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, sequences, document boundaries
MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
# Types of a token id, by the code in the header; `prepare` writes the last two.
DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype(np.uint8), 2: np.dtype(np.int8), 3: np.dtype(np.int16), 5: np.dtype(np.int64),
    4: np.dtype(np.int32), 8: np.dtype(np.uint16),
}  # fmt: skip
# Megatron leaves the last ids of 16 bits unused.
FIRST_WIDE_VOCABULARY = 65_500


def bin_path(prefix: Path) -> Path:
    """Return ``PREFIX.bin``; a dot inside the prefix stays."""
    return prefix.with_name(f"{prefix.name}.bin")


def idx_path(prefix: Path) -> Path:
    """Return ``PREFIX.idx``; a dot inside the prefix stays."""
    return prefix.with_name(f"{prefix.name}.idx")


def id_type(vocab_size: int) -> np.dtype[Any]:
    """Return the type of an id in the file: 2 bytes below a vocabulary of 65,500, else 4."""
    return DTYPES[8] if vocab_size < FIRST_WIDE_VOCABULARY else DTYPES[4]


@dataclass(frozen=True)
class Counts:
    """Documents and tokens of an index."""

    documents: int
    tokens: int  # by the index, which with shifted lengths is fewer than in .bin


Arrays = Callable[[], Iterable[NDArray[Any]]]
"""Parts of an array that may not fit in memory, read anew each time they are asked for."""


def write_index(path: Path, dtype: np.dtype[Any], lengths: Arrays, per_document: Arrays) -> Counts:
    """Write an ``.idx``, one part of each array in memory at a time.

    Args:
        path: File to write.
        dtype: Type of an id in ``.bin``.
        lengths: Tokens of each sequence, int32, in the order of ``.bin``.
        per_document: How many of these sequences each document has.
    """
    code = next(code for code, known in DTYPES.items() if known == dtype)
    num_sequences = num_documents = num_tokens = begun = 0
    with writing(path), path.open("wb") as file:
        file.write(bytes(HEADER.size))
        for part in lengths():
            file.write(part.astype("<i4").tobytes())
            num_sequences += len(part)
        for part in lengths():
            ends = num_tokens + np.cumsum(part, dtype="<i8")
            file.write(((ends - part) * dtype.itemsize).tobytes())
            num_tokens += int(part.sum(dtype=np.int64))
        file.write(bytes(8))
        for part in per_document():
            file.write((begun + np.cumsum(part, dtype="<i8")).tobytes())
            begun += int(part.sum())
            num_documents += len(part)
        file.seek(0)
        file.write(HEADER.pack(MAGIC, VERSION, code, num_sequences, num_documents + 1))
    return Counts(num_documents, num_tokens)


def write(prefix: Path, documents: Iterable[NDArray[Any]], eod: int, vocab_size: int) -> Counts:
    """Write documents of one sequence each, every one closed by ``eod``.

    Args:
        prefix: Path of the pair without ``.bin`` and ``.idx``; its folder exists.
        documents: Token ids of each document, ``eod`` left out; empty ones are skipped.
        eod: The end-of-document id; it belongs to the document's length.
        vocab_size: Decides the width of an id in the file.
    """
    dtype = id_type(vocab_size)
    lengths: list[int] = []
    with writing(bin_path(prefix)), bin_path(prefix).open("wb") as file:
        for ids in documents:
            if len(ids):
                file.write(np.append(ids, eod).astype(dtype).tobytes())
                lengths.append(len(ids) + 1)
    all_lengths = np.array(lengths, np.int32)
    return write_index(
        idx_path(prefix), dtype, lambda: [all_lengths], lambda: [np.ones_like(all_lengths)]
    )


@dataclass(frozen=True)
class Index:
    """An ``.idx`` file and the token ids beside it."""

    lengths: NDArray[np.int32]  # (sequences,) tokens of each sequence
    offsets: NDArray[np.int64]  # (sequences,) first byte of each in .bin
    boundaries: NDArray[np.int64]  # (documents + 1,) first sequence of each document, then the end
    ids: NDArray[Any]  # (tokens,) uint16 or int32, mapped from the file, read-only

    @property
    def num_documents(self) -> int:
        """Return how many documents the index knows."""
        return len(self.boundaries) - 1

    @property
    def num_indexed(self) -> int:
        """Return the tokens the index knows; those in ``.bin`` when all is well."""
        return int(self.lengths.sum(dtype=np.int64))

    def document(self, position: int) -> NDArray[Any]:
        """Return the token ids of one document as Megatron reads it, by offset and length."""
        first, end = self.boundaries[position], self.boundaries[position + 1]
        if first == end:
            return self.ids[:0]
        start = int(self.offsets[first]) // self.ids.itemsize
        return self.ids[start : start + int(self.lengths[first:end].sum())]


def token_header(prefix: Path) -> tuple[int, int, int] | None:
    """Return code of the type, sequences and boundaries; None when it is no index of Megatron's."""
    with idx_path(prefix).open("rb") as file:
        raw = file.read(HEADER.size)
    if len(raw) < HEADER.size:
        return None
    magic, version, code, num_sequences, num_boundaries = HEADER.unpack(raw)
    is_known = magic == MAGIC and version == VERSION and code in DTYPES
    return (code, num_sequences, num_boundaries) if is_known else None


def read(prefix: Path) -> Index:
    """Open a pair; both files are mapped, not read.

    Raises:
        DatasetError: A file is missing, is no index, or is shorter than its header says.
    """
    index, ids = idx_path(prefix), bin_path(prefix)
    for path in (index, ids):
        if not path.is_file():
            raise DatasetError(
                f"no {path}: give the prefix that `python -m dataset prepare` printed, "
                "without .bin or .idx"
            )
    header = token_header(prefix)
    if header is None:
        raise DatasetError(f"{index} is not a Megatron index")
    code, num_sequences, num_boundaries = header
    size, found = HEADER.size + 12 * num_sequences + 8 * num_boundaries, index.stat().st_size
    # An index of several kinds of contents has another byte for each sequence.
    if found not in (size, size + num_sequences) or not num_boundaries:
        raise DatasetError(
            f"{index} is damaged: it has {found:,} bytes, its header says {size:,}; get it again"
        )
    dtype = DTYPES[code]
    if ids.stat().st_size % dtype.itemsize:
        raise DatasetError(f"{ids} is cut off: its size is no multiple of {dtype.itemsize} bytes")
    raw = np.memmap(index, np.uint8, mode="r")
    at_offsets = HEADER.size + 4 * num_sequences
    return Index(
        lengths=np.frombuffer(raw, np.int32, num_sequences, HEADER.size),
        offsets=np.frombuffer(raw, np.int64, num_sequences, at_offsets),
        boundaries=np.frombuffer(raw, np.int64, num_boundaries, at_offsets + 8 * num_sequences),
        # numpy cannot map an empty file
        ids=np.memmap(ids, dtype, mode="r") if ids.stat().st_size else np.empty(0, dtype),
    )
