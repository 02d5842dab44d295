"""Parts to pairs, put in their places one rename at a time."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from dataset import indexed, manifest
from dataset.errors import DatasetError
from dataset.indexed import Counts, bin_path, idx_path
from dataset.manifest import Manifest
from dataset.pipeline import folder
from dataset.pipeline.job import FORMAT_VERSION, Job
from dataset.pipeline.parts import Facts, Part, path_of
from dataset.tokenizer.base import Tokenizer


def join(
    job: Job, facts: Sequence[Facts], tokenizer_path: Path, tokenizer: Tokenizer
) -> list[Manifest]:
    """Make the pair of every key and publish it.

    Killed at any moment, the same call makes the same files again from the parts. The manifest
    comes last: a pair with a manifest is finished.

    Raises:
        DatasetError: A key has no text at all; the parts, of no use then, are cleared.
    """
    _require_text(job, facts)
    dtype = indexed.id_type(tokenizer.vocab_size)
    made = []
    for number, key in enumerate(job.reading.keys):
        pieces = [Part(path_of(job.work_folder, one.number), number) for one in facts]
        draft = job.work_folder / f"unfinished-{number}"
        counts = indexed.write_index(idx_path(draft), dtype, pieces)
        num_tokens = _copy_ids(bin_path(draft), pieces) // dtype.itemsize
        for path_from in (bin_path, idx_path):
            _sync(path_from(draft))
            path_from(draft).replace(path_from(job.prefix(key)))
        _copy_tokenizer(tokenizer_path, _tokenizer_path(job, key))
        described = _describe(job, key, Counts(counts.documents, num_tokens), tokenizer)
        made.append(replace(described, text_bytes=sum(one.text_bytes[number] for one in facts)))
    for_trainer = job.output_prefix.parent / manifest.NAME
    if not for_trainer.exists():
        made[0].write(for_trainer)
    for key, one in zip(job.reading.keys, made, strict=True):
        one.write(manifest.path_of(job.prefix(key)))
    return made


def _require_text(job: Job, facts: Sequence[Facts]) -> None:
    for number, key in enumerate(job.reading.keys):
        if any(one.text_bytes[number] for one in facts):
            continue
        bad = next((bad for one in facts for bad in one.bad), None)
        first = f" ({job.reading.name(bad[0])}:{bad[1]}: {bad[2]})" if bad else ""
        folder.clear(job.work_folder)
        raise DatasetError(f"the input holds no text under '{key}'{first}")


def _copy_ids(path: Path, pieces: Sequence[Part]) -> int:
    num_bytes = 0
    with path.open("wb") as file:
        for piece in pieces:
            num_bytes += file.write(piece.ids().data)
    return num_bytes


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _tokenizer_path(job: Job, key: str) -> Path:
    return job.prefix(key).with_name(f"{job.prefix(key).name}.{job.tokenizer.file_name}")


def _copy_tokenizer(source: Path, target: Path) -> None:
    draft = source.with_name(f"unfinished-copy{source.suffix}")
    draft.write_bytes(source.read_bytes())
    draft.replace(target)


def _describe(job: Job, key: str, counts: Counts, tokenizer: Tokenizer) -> Manifest:
    prefix = job.prefix(key)
    files = [bin_path(prefix), idx_path(prefix), _tokenizer_path(job, key)]
    return Manifest(
        schema_version=manifest.SCHEMA_VERSION,
        key=job.key(),
        prefix=prefix.name,
        documents=counts.documents,
        tokens=counts.tokens,
        text_bytes=0,
        vocab_size=tokenizer.vocab_size,
        eod=-1 if tokenizer.eod is None else tokenizer.eod,
        tokenizer=_tokenizer_path(job, key).name,
        settings={"source": "input", **job.settings()},
        versions={
            "format": str(FORMAT_VERSION),
            **{name: version(name) for name in ("tokenizers", "sentencepiece")},
        },
        files={path.name: manifest.file_facts(path) for path in files},
    )
