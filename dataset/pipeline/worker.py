"""What a worker process does with a block: parse, encode, write the part."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataset.errors import DatasetError
from dataset.indexed import id_type
from dataset.pipeline import parts
from dataset.pipeline.parts import Encoded, Facts
from dataset.readers.blocks import Block
from dataset.readers.parse import BadRecord, Record, parse
from dataset.tokenizer.base import Tokenizer
from dataset.tokenizer.choose import load


@dataclass(frozen=True)
class Task:
    """What every worker is told once."""

    folder: Path
    tokenizer: Path
    keys: tuple[str, ...]
    files: tuple[str, ...]
    append_eod: bool
    shifted_lengths: bool
    stop_at_bad: bool


@dataclass
class _Collected:
    """Documents of one key while a block is worked on."""

    lengths: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    ids: list[NDArray[Any]] = field(default_factory=list)
    text_bytes: int = 0


class Worker:
    """Encodes blocks."""

    def __init__(self, task: Task) -> None:
        """Load the tokenizer.

        Raises:
            DatasetError: It has no id that ends a document, and one is asked for.
        """
        self._task = task
        self._tokenizer: Tokenizer = load(task.tokenizer)
        self._dtype = id_type(self._tokenizer.vocab_size)
        self._eod = np.array([required_eod(self._tokenizer)] if task.append_eod else [], np.uint32)

    def __call__(self, block: Block) -> Facts:
        """Write the part of a block.

        Raises:
            DatasetError: A record cannot be used, and the user wants to stop at such.
        """
        collected = [_Collected() for _ in self._task.keys]
        begun_s = time.perf_counter()
        encode_s, empty = 0.0, 0
        bad: list[tuple[int, int, str]] = []
        for file, found in self._records(block):
            if isinstance(found, BadRecord):
                bad.append((file, found.line, found.reason))
                continue
            start_s = time.perf_counter()
            empty += not self._encode(found, collected)
            encode_s += time.perf_counter() - start_s
        write_s = time.perf_counter()
        keys = [self._joined(one) for one in collected]
        facts = Facts(
            number=block.number,
            end=block.end,
            consumed_bytes=block.consumed_bytes,
            text_bytes=[one.text_bytes for one in collected],
            tokens=sum(len(one.ids) for one in keys),
            empty=empty,
            num_bad=len(bad),
            bad=bad[: parts.MOST_BAD_LISTED],
            seconds={"parse": write_s - begun_s - encode_s, "encode": encode_s},
        )
        parts.write(self._task.folder, facts, keys)
        facts.seconds["write"] = time.perf_counter() - write_s
        return facts

    def _records(self, block: Block) -> Iterator[tuple[int, Record | BadRecord]]:
        for file, piece in block.pieces:
            for found in parse(piece, self._task.keys):
                if isinstance(found, BadRecord) and self._task.stop_at_bad:
                    raise DatasetError(
                        f"{self._task.files[file]}:{found.line}: {found.reason}; "
                        "--bad-lines skip leaves such lines out"
                    )
                yield file, found

    def _encode(self, record: Record, collected: list[_Collected]) -> int:
        """Add a record's documents, one for each key; returns how many have text."""
        num_documents = 0
        for key, into in zip(self._task.keys, collected, strict=True):
            count = 0
            for text in record.texts.get(key, []):
                ids = self._tokenizer.encode(text)
                if len(ids):
                    into.ids.append(ids)
                    into.lengths.append(len(ids))
                    count += 1
                    into.text_bytes += len(text) if text.isascii() else len(text.encode())
            num_documents += count > 0
            if count:
                into.ids.append(self._eod)
                if not self._task.shifted_lengths:
                    # End-of-document belongs to the last sequence, else document k would be read
                    # from k tokens too early.
                    into.lengths[-1] += len(self._eod)
            if count or self._task.shifted_lengths:
                into.counts.append(count)
        return num_documents

    def _joined(self, one: _Collected) -> Encoded:
        ids = np.concatenate(one.ids) if one.ids else np.empty(0)
        return Encoded(
            np.array(one.lengths, np.int32), np.array(one.counts, np.int32), ids.astype(self._dtype)
        )


def required_eod(tokenizer: Tokenizer) -> int:
    """The id that ends a document.

    Raises:
        DatasetError: The vocabulary has none.
    """
    if tokenizer.eod is None:
        raise DatasetError(
            "--append-eod: the vocabulary has no token that ends a document "
            "(<|endoftext|>, or SentencePiece's end of sentence)"
        )
    return tokenizer.eod


_worker: Worker | None = None


def start(task: Task) -> None:
    """Make this process a worker."""
    global _worker
    _worker = Worker(task)


def work(block: Block) -> Facts:
    """Do one block in this process."""
    assert _worker is not None
    return _worker(block)
