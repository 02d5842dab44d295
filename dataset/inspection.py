"""What is in a ``.bin``/``.idx`` pair, and whether its parts agree."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dataset import indexed, manifest, vocabulary
from dataset.errors import DatasetError
from dataset.indexed import Index
from dataset.manifest import Manifest

SAMPLE_TOKENS = 128


@dataclass(frozen=True)
class Inspection:
    """What `inspect` found."""

    documents: int
    tokens: int
    manifest: Manifest | None
    """None for a pair that did not come from `prepare`: then only its structure is checked."""
    sample: str | None
    """The beginning of one document; None without a tokenizer, or when the pair is damaged."""
    problems: tuple[str, ...]
    """What is wrong, one sentence each."""


def inspect_prefix(prefix: Path, sampled_document: int = 0) -> Inspection:
    """Look into a pair and check it.

    Args:
        prefix: Path without ``.bin`` and ``.idx``.
        sampled_document: Whose beginning to decode, from 0.

    Raises:
        DatasetError: There is no such pair or no such document, or a file is not what its name
            says.
    """
    index = indexed.read(prefix)
    if not 0 <= sampled_document < index.num_documents:
        raise DatasetError(
            f"document {sampled_document}: {prefix} has documents 0 to {index.num_documents - 1}"
        )
    known = _manifest_of(prefix)
    problems = list(_structure_problems(index))
    sample = None
    if known:
        if damage := known.damage(prefix.parent):
            problems.append(damage)
        if not problems:
            problems += _content_problems(index, known)
        if not problems:
            tokenizer = vocabulary.load(prefix.parent / known.tokenizer)
            sample = tokenizer.decode(index.document(sampled_document)[:SAMPLE_TOKENS].tolist())
    return Inspection(index.num_documents, len(index.ids), known, sample, tuple(problems))


def _manifest_of(prefix: Path) -> Manifest | None:
    """The manifest beside a pair, if there is one and it is about this pair."""
    if not (prefix.parent / manifest.NAME).exists():
        return None
    found = manifest.read(prefix.parent)
    return found if found.prefix == prefix.name else None


def _structure_problems(index: Index) -> Iterator[str]:
    """Does the index describe all of ``.bin``, in order, and nothing else?"""
    ends = np.cumsum(index.lengths, dtype=np.int64)  # (sequences,) in tokens
    num_indexed = int(ends[-1]) if len(ends) else 0
    if num_indexed != len(index.ids):
        yield f"the index counts {num_indexed} tokens, .bin holds {len(index.ids)}"
    if not np.array_equal(index.offsets, (ends - index.lengths) * index.ids.itemsize):
        yield "a sequence does not begin where the one before it ends"
    bounds = index.boundaries
    if bounds[0] != 0 or bounds[-1] != len(index.lengths) or (np.diff(bounds) < 1).any():
        yield "the documents do not share out the sequences"


def _content_problems(index: Index, known: Manifest) -> Iterator[str]:
    """Are the ids what the manifest says? The structure must be sound."""
    if (index.num_documents, len(index.ids)) != (known.documents, known.tokens):
        yield f"{manifest.NAME} counts {known.documents} documents and {known.tokens} tokens"
    if len(index.ids) and int(index.ids.max()) >= known.vocab_size:
        yield f"an id is outside the vocabulary of {known.vocab_size}"
    last = np.cumsum(index.lengths, dtype=np.int64)[index.boundaries[1:] - 1] - 1
    num_closed = int((index.ids[last] == known.eod).sum())
    num_eods = int((index.ids == known.eod).sum())
    if not num_closed == num_eods == index.num_documents:
        yield (
            f"{num_closed} of {index.num_documents} documents end with end-of-document, "
            f"which occurs {num_eods} times"
        )
