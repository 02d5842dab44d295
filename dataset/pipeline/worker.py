"""What a worker process does with a block: parse, encode, write the part."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataset.errors import DatasetError
from dataset.indexed import id_type
from dataset.pipeline import parts
from dataset.pipeline.parts import Facts
from dataset.readers.blocks import Bad, Block
from dataset.tokenizer.choose import Tokenizer, load


@dataclass(frozen=True)
class Task:
    """What all blocks of a job have in common."""

    folder: Path
    tokenizer: Path
    keys: tuple[str, ...]
    append_eod: bool
    shifted_lengths: bool

    def encode(self, block: Block) -> Facts:
        """Write the part of a block."""
        tokenizer = _opened(self.tokenizer)
        eod = np.array([required_eod(tokenizer)] if self.append_eod else [], np.uint32)
        collected = [_Documents() for _ in self.keys]
        begun_s = time.perf_counter()
        encode_s, empty = 0.0, 0
        bad: list[Bad] = []
        for record in block.records(self.keys, bad):
            start_s = time.perf_counter()
            has_text = False
            for key, documents in zip(self.keys, collected, strict=True):
                texts = record.texts.get(key, [])
                has_text |= documents.add(texts, tokenizer, eod, self.shifted_lengths)
            empty += not has_text
            encode_s += time.perf_counter() - start_s
        write_s = time.perf_counter()
        keys = [one.arrays(id_type(tokenizer.vocab_size)) for one in collected]
        facts = Facts(
            number=block.number,
            consumed_bytes=block.consumed_bytes,
            text_bytes=[one.text_bytes for one in collected],
            tokens=sum(len(ids) for _, _, ids in keys),
            empty=empty,
            num_bad=len(bad),
            bad=bad[: parts.MOST_BAD_LISTED],
            seconds={"parse": write_s - begun_s - encode_s, "encode": encode_s},
        )
        parts.write(self.folder, facts, keys)
        facts.seconds["write"] = time.perf_counter() - write_s
        return facts


@dataclass
class _Documents:
    """Documents of one key while a block is worked on."""

    lengths: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    ids: list[NDArray[Any]] = field(default_factory=list)
    text_bytes: int = 0

    def add(
        self, texts: list[str], tokenizer: Tokenizer, eod: NDArray[Any], shifted_lengths: bool
    ) -> bool:
        """Add the document that some texts are; returns whether it has a token."""
        count = 0
        for text in texts:
            ids = tokenizer.encode(text)
            if len(ids):
                self.ids.append(ids)
                self.lengths.append(len(ids))
                count += 1
                self.text_bytes += len(text) if text.isascii() else len(text.encode())
        if count:
            self.ids.append(eod)
            if not shifted_lengths:
                # End-of-document belongs to the last sequence, else document k would be read from
                # k tokens too early.
                self.lengths[-1] += len(eod)
        if count or shifted_lengths:
            self.counts.append(count)
        return count > 0

    def arrays(self, dtype: np.dtype[Any]) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        """Lengths, counts and ids, as a part has them."""
        ids = np.concatenate(self.ids) if self.ids else np.empty(0)
        return np.array(self.lengths, np.int32), np.array(self.counts, np.int32), ids.astype(dtype)


@cache
def _opened(path: Path) -> Tokenizer:
    return load(path)


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
