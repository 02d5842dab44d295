"""Pairs that are there: one inspected, several merged to one."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dataset import indexed, manifest
from dataset.files import DatasetError, content_key, require_writable, writing
from dataset.indexed import Counts, Index, bin_path, idx_path
from dataset.manifest import Manifest
from dataset.tokenizer import load

SAMPLE_TOKENS = 128
IDS_AT_ONCE = 1 << 22


@dataclass(frozen=True)
class Inspection:
    """The findings of `inspect`."""

    index: Index
    manifest: Manifest | None
    """None for a pair that did not come from `prepare`: then only its structure is checked."""
    sample: str | None
    """The beginning of one document; None without a manifest, or when the pair is damaged."""
    problems: list[str]
    """Damage, a sentence each."""


def inspect_pair(prefix: Path, sampled_document: int = 0) -> Inspection:
    """Look into a pair and check it.

    Args:
        prefix: Path without ``.bin`` and ``.idx``.
        sampled_document: The document whose beginning to decode, from 0.

    Raises:
        DatasetError: There is no such pair or no such document, or a file is not what its name
            says.
    """
    index, sample = indexed.read(prefix), None
    if not 0 <= sampled_document < max(1, index.num_documents):
        raise DatasetError(
            f"document {sampled_document}: {prefix} has documents 0 to {index.num_documents - 1}"
        )
    known = manifest.find(prefix)
    problems = list(_structure_problems(index))
    if known:
        if damage := known.damage(prefix.parent):
            problems.append(damage)
        if not problems:
            problems += _content_problems(index, known)
    if known and not problems and index.num_documents:
        tokenizer = load(prefix.parent / known.tokenizer)
        sample = tokenizer.decode(index.document(sampled_document)[:SAMPLE_TOKENS].tolist())
    return Inspection(index, known, sample, problems)


def _structure_problems(index: Index) -> Iterator[str]:
    """Check that the index describes all of ``.bin``, in order, and nothing else."""
    num_indexed, num_there = index.num_indexed, len(index.ids)
    if num_indexed != num_there:
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
    if bounds[0] != 0 or bounds[-1] != len(index.lengths) or (np.diff(bounds) < 1).any():
        yield "the documents do not share out the sequences"


def _content_problems(index: Index, known: Manifest) -> Iterator[str]:
    """Check that the ids are what the manifest says; the structure must be sound."""
    if (index.num_documents, len(index.ids)) != (known.documents, known.tokens):
        yield f"the manifest counts {known.documents} documents and {known.tokens} tokens"
    highest, num_eods = 0, 0
    for start in range(0, len(index.ids), IDS_AT_ONCE):
        ids = index.ids[start : start + IDS_AT_ONCE]
        highest = max(highest, int(ids.max()))
        num_eods += int((ids == known.eod).sum())
    if highest >= known.vocab_size:
        yield f"an id is outside the vocabulary of {known.vocab_size}"
    if not known.settings.get("append_eod"):
        return
    last = np.cumsum(index.lengths, dtype=np.int64)[index.boundaries[1:] - 1] - 1
    num_closed = int((index.ids[last] == known.eod).sum())
    if not num_closed == num_eods == index.num_documents:
        yield (
            f"{num_closed} of {index.num_documents} documents end with end-of-document, "
            f"which occurs {num_eods} times"
        )


def merge(prefixes: Sequence[Path], output: Path) -> Counts:
    """Write a pair that holds the documents of all, in the order given.

    Killed half-way it leaves nothing under the output's name.

    Args:
        prefixes: Pairs, absolute, two or more.
        output: Prefix to write, absolute; nothing may be there.

    Raises:
        DatasetError: A pair is damaged, the pairs do not belong together, or the output exists.
    """
    pairs = [indexed.read(prefix) for prefix in prefixes]
    known = [manifest.find(prefix) for prefix in prefixes]
    _require_mergeable(prefixes, pairs, known)
    for path in (bin_path(output), idx_path(output), manifest.path_of(output)):
        if path.exists():
            raise DatasetError(f"{path} is there already: give another --output-prefix")
    if known[0]:
        manifest.require_one_vocabulary(output.parent, known[0].vocab_size, known[0].eod)
    require_writable(output, "--output-prefix")
    # The new manifest would vouch for damaged files.
    for prefix, facts in dict(zip(prefixes, known, strict=True)).items():
        if facts and (damage := facts.damage(prefix.parent)):
            raise DatasetError(f"{prefix} is damaged: {damage}; prepare it again")
    draft = output.with_name(f".unfinished-{output.name}")
    try:
        counts = indexed.write_index(
            idx_path(draft),
            pairs[0].ids.dtype,
            lambda: (pair.lengths for pair in pairs),
            lambda: (np.diff(pair.boundaries) for pair in pairs),
        )
        with writing(bin_path(output)), bin_path(draft).open("wb") as target:
            for prefix in prefixes:
                with bin_path(prefix).open("rb") as source:
                    shutil.copyfileobj(source, target, 1 << 22)
        for path_of in (bin_path, idx_path):
            path_of(draft).replace(path_of(output))
    finally:
        for path_of in (bin_path, idx_path):
            path_of(draft).unlink(missing_ok=True)
    facts_of_all = [one for one in known if one]
    if len(facts_of_all) == len(known):
        _describe(prefixes[0], facts_of_all, output, counts)
    return counts


def _require_mergeable(
    prefixes: Sequence[Path], pairs: Sequence[Index], known: Sequence[Manifest | None]
) -> None:
    first = pairs[0]
    for prefix, pair, facts in zip(prefixes, pairs, known, strict=True):
        if pair.num_indexed != len(pair.ids):
            raise DatasetError(
                f"{prefix}: the index counts {pair.num_indexed} tokens, .bin holds "
                f"{len(pair.ids)}; joined to others every later document would be wrong"
            )
        if pair.ids.dtype != first.ids.dtype:
            raise DatasetError(
                f"{prefix} has ids of {pair.ids.itemsize} bytes, {prefixes[0]} of "
                f"{first.ids.itemsize}: they are of different vocabularies"
            )
        if facts and known[0] and _vocabulary(facts) != _vocabulary(known[0]):
            raise DatasetError(f"{prefix} and {prefixes[0]} have different vocabularies")


def _vocabulary(facts: Manifest) -> tuple[int, int, str]:
    return facts.vocab_size, facts.eod, facts.files[facts.tokenizer]["sha256"]


def _describe(first_prefix: Path, known: list[Manifest], output: Path, counts: Counts) -> None:
    first = known[0]
    tokenizer = output.with_name(f"{output.name}.tokenizer{Path(first.tokenizer).suffix}")
    with writing(tokenizer):
        shutil.copyfile(first_prefix.with_name(first.tokenizer), tokenizer)
    files = [bin_path(output), idx_path(output), tokenizer]
    closed = all(one.settings.get("append_eod") for one in known)
    merged = [one.prefix for one in known]
    changes = {
        "key": content_key({"merged": [one.key for one in known]}),
        "prefix": output.name,
        "documents": counts.documents,
        "tokens": counts.tokens,
        "text_bytes": sum(one.text_bytes for one in known),
        "tokenizer": tokenizer.name,
        "settings": {"source": "merge", "append_eod": closed, "merged": merged},
        "files": {path.name: manifest.file_facts(path) for path in files},
    }
    first.model_copy(update=changes).publish(output)
