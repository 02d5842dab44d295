"""Several pairs to one."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from dataset import indexed, manifest
from dataset.errors import DatasetError
from dataset.files import content_key, require_writable, writing
from dataset.indexed import Counts, Index, bin_path, idx_path
from dataset.manifest import Manifest


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
    _require_sound(prefixes, known)
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
    _describe(prefixes, known, output, counts)
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


def _require_sound(prefixes: Sequence[Path], known: Sequence[Manifest | None]) -> None:
    """Check every pair against its manifest: the new one would vouch for damaged files."""
    for prefix, facts in dict(zip(prefixes, known, strict=True)).items():
        if facts and (damage := facts.damage(prefix.parent)):
            raise DatasetError(f"{prefix} is damaged: {damage}; prepare it again")


def _vocabulary(facts: Manifest) -> tuple[int, int, str]:
    return facts.vocab_size, facts.eod, facts.files[facts.tokenizer]["sha256"]


def _describe(
    prefixes: Sequence[Path], known: Sequence[Manifest | None], output: Path, counts: Counts
) -> None:
    """Write a manifest when every pair has one."""
    facts = [one for one in known if one]
    if len(facts) < len(known):
        return
    first = facts[0]
    suffix = Path(first.tokenizer).suffix
    tokenizer = output.with_name(f"{output.name}.tokenizer{suffix}")
    with writing(tokenizer):
        shutil.copyfile(prefixes[0].with_name(first.tokenizer), tokenizer)
    files = [bin_path(output), idx_path(output), tokenizer]
    closed = all(one.settings.get("append_eod") for one in facts)
    made = replace(
        first,
        key=content_key({"merged": [one.key for one in facts]}),
        prefix=output.name,
        documents=counts.documents,
        tokens=counts.tokens,
        text_bytes=sum(one.text_bytes for one in facts),
        tokenizer=tokenizer.name,
        settings={"source": "merge", "append_eod": closed, "merged": [one.prefix for one in facts]},
        files={path.name: manifest.file_facts(path) for path in files},
    )
    made.publish(output)
