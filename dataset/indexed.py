"""Megatron's ``.bin``/``.idx`` pair: written by megatron-core, read back by numpy alone.

``.bin`` is every token id, one after the other. ``.idx`` is a header, then the length of every
sequence (int32), its byte offset in ``.bin`` (int64), and the sequence number at which each
document begins, closed by the total (int64).
"""

from __future__ import annotations

import struct
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataset.errors import DatasetError

HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, sequences, document boundaries
MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
# The two types that hold token ids, by the code in the header.
DTYPES: dict[int, np.dtype[Any]] = {4: np.dtype(np.int32), 8: np.dtype(np.uint16)}


def bin_path(prefix: Path) -> Path:
    """``PREFIX.bin``; a dot inside the prefix stays."""
    return prefix.with_name(f"{prefix.name}.bin")


def idx_path(prefix: Path) -> Path:
    """``PREFIX.idx``; a dot inside the prefix stays."""
    return prefix.with_name(f"{prefix.name}.idx")


@dataclass(frozen=True)
class Counts:
    """What was written."""

    documents: int
    tokens: int  # end-of-document tokens included


def write(prefix: Path, documents: Iterable[list[int]], eod: int, vocab_size: int) -> Counts:
    """Write documents of one sequence each, every one closed by ``eod``.

    The end-of-document token belongs to the length of the document's last sequence. Without that,
    document k would be read from k tokens too early.

    Args:
        prefix: Path of the pair without ``.bin`` and ``.idx``; its folder exists.
        documents: Token ids of each document, ``eod`` left out; empty ones are skipped.
        eod: The end-of-document id.
        vocab_size: Decides the width of an id in the file: 2 bytes below 65,500, else 4.
    """
    builder_class, dtype_of = _megatron()
    builder = builder_class(str(bin_path(prefix)), dtype=dtype_of(vocab_size))
    num_documents = num_tokens = 0
    for ids in documents:
        if not ids:
            continue
        closed = [*ids, eod]
        builder.add_document(closed, [len(closed)])
        num_documents += 1
        num_tokens += len(closed)
    builder.finalize(str(idx_path(prefix)))
    return Counts(num_documents, num_tokens)


def _megatron() -> tuple[Any, Any]:
    # Here and not above: the import brings torch, some seconds that only a build needs.
    with warnings.catch_warnings():
        # It warns of optional parts that are not installed; none of them writes files.
        warnings.simplefilter("ignore")
        from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder
    return IndexedDatasetBuilder, DType.optimal_dtype


@dataclass(frozen=True)
class Index:
    """An ``.idx`` file and the token ids beside it."""

    lengths: NDArray[np.int32]  # (sequences,) tokens of each sequence
    offsets: NDArray[np.int64]  # (sequences,) first byte of each in .bin
    boundaries: NDArray[np.int64]  # (documents + 1,) first sequence of each document, then the end
    ids: NDArray[Any]  # (tokens,) uint16 or int32, mapped from the file, read-only

    @property
    def num_documents(self) -> int:
        """Documents the index knows."""
        return len(self.boundaries) - 1

    def document(self, position: int) -> NDArray[Any]:
        """Token ids of one document as Megatron reads it, from offset and length."""
        first, end = self.boundaries[position], self.boundaries[position + 1]
        start = int(self.offsets[first]) // self.ids.itemsize
        return self.ids[start : start + int(self.lengths[first:end].sum())]


def read(prefix: Path) -> Index:
    """Open a pair.

    Raises:
        DatasetError: A file is missing, is no index, or is shorter than its header says.
    """
    for path in (idx_path(prefix), bin_path(prefix)):
        if not path.is_file():
            raise DatasetError(
                f"no {path}: give the prefix that `python -m dataset prepare` printed, "
                "without .bin or .idx"
            )
    raw = idx_path(prefix).read_bytes()
    if len(raw) < HEADER.size or not raw.startswith(MAGIC):
        raise DatasetError(f"{idx_path(prefix)} is not a Megatron index")
    _, version, code, num_sequences, num_boundaries = HEADER.unpack_from(raw)
    if version != VERSION or code not in DTYPES:
        raise DatasetError(
            f"{idx_path(prefix)}: version {version} with id type {code} is not one this reads "
            f"(version {VERSION}; types {sorted(DTYPES)})"
        )
    if len(raw) != HEADER.size + 12 * num_sequences + 8 * num_boundaries or not num_boundaries:
        raise DatasetError(
            f"{idx_path(prefix)} is cut off or damaged: its size is not its header's"
        )
    ids = bin_path(prefix)
    dtype = DTYPES[code]
    if ids.stat().st_size % dtype.itemsize:
        raise DatasetError(f"{ids} is cut off: its size is no multiple of {dtype.itemsize} bytes")
    at_offsets = HEADER.size + 4 * num_sequences
    return Index(
        lengths=np.frombuffer(raw, np.int32, num_sequences, HEADER.size),
        offsets=np.frombuffer(raw, np.int64, num_sequences, at_offsets),
        boundaries=np.frombuffer(raw, np.int64, num_boundaries, at_offsets + 8 * num_sequences),
        # numpy cannot map an empty file
        ids=np.memmap(ids, dtype, mode="r") if ids.stat().st_size else np.empty(0, dtype),
    )
