"""Parts to pairs, put in their places one rename at a time."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from importlib.metadata import version

from dataset import indexed, manifest
from dataset.files import writing
from dataset.indexed import bin_path, idx_path
from dataset.manifest import Manifest
from dataset.pipeline import parts
from dataset.pipeline.job import FORMAT_VERSION, Job
from dataset.pipeline.parts import Facts
from dataset.tokenizer.choose import Tokenizer


def join(job: Job, facts: Sequence[Facts], tokenizer: Tokenizer) -> list[Manifest]:
    """Make the pair of every key and publish it.

    Killed at any moment, the same call makes the same files again from the parts. The manifest
    comes last: a pair with a manifest is finished.
    """
    made = [_pair(job, number, facts, tokenizer) for number in range(len(job.reading.keys))]
    for one in made:
        one.publish(job.output_prefix.with_name(one.prefix))
    return made


def _pair(job: Job, number: int, facts: Sequence[Facts], tokenizer: Tokenizer) -> Manifest:
    """Publish the pair of the key of this number; returns its manifest."""
    paths = [parts.path_of(job.work_folder, one.number) for one in facts]
    dtype = indexed.id_type(tokenizer.vocab_size)
    draft = job.work_folder / f"unfinished-{number}"
    lengths, per_document = (
        partial(map, partial(parts.read, name=name, key=number), paths)
        for name in ("lengths", "counts")
    )
    counts = indexed.write_index(idx_path(draft), dtype, lengths, per_document)
    with writing(bin_path(draft)), bin_path(draft).open("wb") as file:
        num_bytes = sum(file.write(parts.read(path, "ids", number).data) for path in paths)
    prefix, name = job.prefix(job.reading.keys[number]), job.tokenizer.file_name
    files = [bin_path(prefix), idx_path(prefix), prefix.with_name(f"{prefix.name}.{name}")]
    copy = job.work_folder / f"unfinished-{name}"
    with writing(copy):
        copy.write_bytes((job.work_folder / name).read_bytes())
    for made, path in zip((bin_path(draft), idx_path(draft), copy), files, strict=True):
        with made.open("rb") as file:
            os.fsync(file.fileno())
        made.replace(path)
    return Manifest(
        schema_version=manifest.SCHEMA_VERSION,
        key=job.key(),
        prefix=prefix.name,
        documents=counts.documents,
        tokens=num_bytes // dtype.itemsize,
        text_bytes=sum(one.text_bytes[number] for one in facts),
        vocab_size=tokenizer.vocab_size,
        eod=-1 if tokenizer.eod is None else tokenizer.eod,
        tokenizer=files[-1].name,
        settings={"source": "input", **job.settings()},
        versions={
            "format": str(FORMAT_VERSION),
            **{name: version(name) for name in ("tokenizers", "sentencepiece")},
        },
        files={path.name: manifest.file_facts(path) for path in files},
    )
