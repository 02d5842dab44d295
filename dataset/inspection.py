"""What is in a ``.bin``/``.idx`` pair, and whether its parts agree."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dataset import indexed, manifest
from dataset.errors import DatasetError
from dataset.indexed import Index
from dataset.manifest import Manifest
from dataset.tokenizer.choose import Tokenizer, load

SAMPLE_TOKENS = 128
IDS_AT_ONCE = 1 << 22


@dataclass(frozen=True)
class Inspection:
    """What `inspect` found."""

    documents: int
    tokens: int
    id_bytes: int
    longest: int
    """Tokens of the longest sequence."""
    manifest: Manifest | None
    """None for a pair that did not come from `prepare`: then only its structure is checked."""
    sample: str | None
    """The beginning of one document; None without a tokenizer, or when the pair is damaged."""
    problems: tuple[str, ...]
    """What is wrong, one sentence each."""


def inspect_prefix(
    prefix: Path, sampled_document: int = 0, tokenizer: Tokenizer | None = None
) -> Inspection:
    """Look into a pair and check it.

    Args:
        prefix: Path without ``.bin`` and ``.idx``.
        sampled_document: Whose beginning to decode, from 0.
        tokenizer: What to decode with, for a pair that has none beside it.

    Raises:
        DatasetError: There is no such pair or no such document, or a file is not what its name
            says.
    """
    index = indexed.read(prefix)
    if not 0 <= sampled_document < max(1, index.num_documents):
        raise DatasetError(
            f"document {sampled_document}: {prefix} has documents 0 to {index.num_documents - 1}"
        )
    known = manifest.find(prefix)
    problems = list(_structure_problems(index, known))
    sample = None
    if known:
        if damage := known.damage(prefix.parent):
            problems.append(damage)
        if not problems:
            problems += _content_problems(index, known)
    if not problems and index.num_documents:
        if known and not tokenizer:
            tokenizer = load(prefix.parent / known.tokenizer)
        if tokenizer:
            sample = tokenizer.decode(index.document(sampled_document)[:SAMPLE_TOKENS].tolist())
    return Inspection(
        documents=index.num_documents,
        tokens=len(index.ids),
        id_bytes=index.ids.itemsize,
        longest=int(index.lengths.max(initial=0)),
        manifest=known,
        sample=sample,
        problems=tuple(problems),
    )


def is_shifted(known: Manifest | None) -> bool:
    """Whether lengths without end-of-document were asked for."""
    return bool(known and known.settings.get("megatron_deepspeed_compat"))


def _structure_problems(index: Index, known: Manifest | None) -> Iterator[str]:
    """Does the index describe all of ``.bin``, in order, and nothing else?"""
    num_indexed, num_there = index.num_indexed, len(index.ids)
    if num_indexed != num_there and not is_shifted(known):
        yield f"the index counts {num_indexed} tokens, .bin holds {num_there}" + (
            ": one fewer for each document, as Megatron-DeepSpeed's --append-eod writes it, so "
            "that document k is read k tokens too early; prepare the text again"
            if num_there - num_indexed == int((np.diff(index.boundaries) > 0).sum())
            else ""
        )
    ends = np.cumsum(index.lengths, dtype=np.int64)  # (sequences,) in tokens
    if not np.array_equal(index.offsets, (ends - index.lengths) * index.ids.itemsize):
        yield "a sequence does not begin where the one before it ends"
    bounds = index.boundaries
    smallest = 0 if is_shifted(known) else 1
    if bounds[0] != 0 or bounds[-1] != len(index.lengths) or (np.diff(bounds) < smallest).any():
        yield "the documents do not share out the sequences"


def _content_problems(index: Index, known: Manifest) -> Iterator[str]:
    """Are the ids what the manifest says? The structure must be sound."""
    if (index.num_documents, len(index.ids)) != (known.documents, known.tokens):
        yield f"the manifest counts {known.documents} documents and {known.tokens} tokens"
    highest, num_eods = 0, 0
    for start in range(0, len(index.ids), IDS_AT_ONCE):
        ids = index.ids[start : start + IDS_AT_ONCE]
        highest = max(highest, int(ids.max()))
        num_eods += int((ids == known.eod).sum())
    if highest >= known.vocab_size:
        yield f"an id is outside the vocabulary of {known.vocab_size}"
    if not known.settings.get("append_eod") or is_shifted(known):
        return
    last = np.cumsum(index.lengths, dtype=np.int64)[index.boundaries[1:] - 1] - 1
    num_closed = int((index.ids[last] == known.eod).sum())
    if not num_closed == num_eods == index.num_documents:
        yield (
            f"{num_closed} of {index.num_documents} documents end with end-of-document, "
            f"which occurs {num_eods} times"
        )
