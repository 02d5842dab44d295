"""`prepare --input`: many files to one pair, however often it is stopped.

Worker processes turn blocks of text into parts, files that are whole or not there; the parts are
joined at the end. A run that was stopped goes on with the parts that are missing.
"""

from __future__ import annotations

import itertools
import json
import os
import zipfile
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from configs.files import read_json, write_json
from dataset import indexed, manifest
from dataset.files import (
    LOCK_NAME,
    MEGABYTE,
    DatasetError,
    content_key,
    locked,
    progress,
    require_writable,
    writing,
)
from dataset.indexed import bin_path, idx_path
from dataset.manifest import Manifest
from dataset.pool import ordered
from dataset.readers import NESTED, Bad, Block, Reading, blocks
from dataset.tokenizer import (
    DEFAULT_VOCAB_SIZE,
    TRAIN_BYTES,
    Choice,
    Tokenizer,
    load,
    required_eod,
)

# Raise it when the same text must give other parts or other files.
FORMAT_VERSION = 3
PLAN_NAME = "plan.json"
PART, UNFINISHED = ".part", ".unfinished"
ARRAYS = ("lengths", "counts", "ids")
"""Arrays of a part, for each key: (sequences,) tokens, (documents,) sequences, (tokens,) ids."""
MOST_BAD_LISTED = 1000
# What the readers of zip files, arrays and JSON raise on damage: a flag may be flipped as well.
DAMAGE = (zipfile.BadZipFile, RuntimeError, ValueError, KeyError, TypeError, OSError, EOFError)

Say = Callable[[str], None]


@dataclass(frozen=True)
class Preparation:
    """Files in, pairs out."""

    reading: Reading
    output_prefix: Path  # absolute
    tokenizer: Choice
    append_eod: bool
    workers: int = 1

    @property
    def work_folder(self) -> Path:
        """Return the folder in which parts wait to be joined."""
        return self.output_prefix.with_name(f"{self.output_prefix.name}.parts")

    @property
    def bad_lines_path(self) -> Path:
        """Return the file that lists records that cannot be used."""
        return self.output_prefix.with_name(f"{self.output_prefix.name}.bad-lines.txt")

    def prefix(self, key: str) -> Path:
        """Return where the pair of a key goes, named as by Megatron."""
        return self.output_prefix.with_name(f"{self.output_prefix.name}_{key}_document")

    def settings(self) -> dict[str, Any]:
        """Return all that decides the bytes but the text, as plain JSON."""
        return {
            "json_keys": list(self.reading.keys),
            "sample_by": self.reading.sample_by,
            "tokenizer": self.tokenizer.identity(),
            "append_eod": self.append_eod,
        }

    def plan(self) -> dict[str, Any]:
        """Return what parts made by an earlier run must agree on to be of use to this one."""
        files = self.reading.files
        return {
            "format": FORMAT_VERSION,
            "input": [[str(f.path), f.kind, f.size_bytes, f.modified_ns] for f in files],
            "part_bytes": self.reading.block_bytes,
            **self.settings(),
        }

    def key(self) -> str:
        """Return the digest of the plan, part sizes left out: they do not show in the files."""
        return content_key({**self.plan(), "part_bytes": None})


@dataclass(frozen=True)
class Facts:
    """Counts of a part."""

    number: int
    consumed_bytes: int
    """Bytes of the input files on disk, up to the end of this part."""
    text_bytes: list[int]
    """Bytes of the documents in UTF-8, by key."""
    tokens: int
    """Tokens of all keys."""
    empty: int
    """Records without text, left out."""
    num_bad: int
    """Records that cannot be used."""
    bad: list[Bad]
    """The first of them."""
    of_files: list[tuple[int, int, int]] = field(default_factory=list)
    """Number of each file, how many records of it there are, and how many cannot be used."""


@dataclass(frozen=True)
class Finished:
    """The outcome of a job."""

    manifests: list[Manifest]
    """One for each key."""
    facts: list[Facts]
    """Facts of all parts; none when an earlier call had finished."""


def run(job: Preparation, say: Say) -> Finished:
    """Do a job, or what is left of it.

    Args:
        job: What is asked for.
        say: Gets one line for each thing worth telling.

    Raises:
        DatasetError: An input, an option or an output is in the way; parts stay where they are.
    """
    require_writable(job.output_prefix, "--output-prefix")
    with locked(job.work_folder, drop_empty=True):
        if before := _finished_before(job):
            _clear(job.work_folder)
            return Finished(before, [])
        done = _claim(job, say)
        try:
            path, tokenizer = _tokenizer(job, say)
        except DatasetError:
            if not done:  # nothing is lost
                _clear(job.work_folder)
            raise
        task = BlockEncoder(job.work_folder, path, job.reading.keys, job.append_eod)
        made = _make_parts(job, task, done)
        facts = [one for _, one in sorted((done | made).items())]
        _require_text(job, facts)
        _require_unchanged(job)
        say(f"joining {len(facts):,} parts")
        manifests = _join(job, facts, tokenizer, _damaged_files(job, facts))
        list_bad_lines(job, facts)
        _clear(job.work_folder)
    return Finished(manifests, facts)


def _tokenizer(job: Preparation, say: Say) -> tuple[Path, Tokenizer]:
    """Return the file in the work folder and the tokenizer, made or learnt unless it is there.

    Raises:
        DatasetError: It cannot be had, or does not fit what the folder of the output holds.
    """
    path = job.tokenizer.make(job.work_folder, lambda: _texts_to_learn_from(job, say))
    tokenizer = load(path)
    asked = job.tokenizer.vocab_size or DEFAULT_VOCAB_SIZE
    if job.tokenizer.learns and tokenizer.vocab_size < asked:
        say(f"the text gave {tokenizer.vocab_size:,} entries, of {asked:,} asked for")
    eod = -1 if tokenizer.eod is None else tokenizer.eod
    manifest.require_one_vocabulary(job.output_prefix.parent, tokenizer.vocab_size, eod)
    if job.append_eod:
        required_eod(tokenizer)
    return path, tokenizer


def _finished_before(job: Preparation) -> list[Manifest]:
    found = []
    for prefix in map(job.prefix, job.reading.keys):
        paths = manifest.path_of(prefix), bin_path(prefix), idx_path(prefix)
        if not all(path.exists() for path in paths):
            return []
        found.append(manifest.read(paths[0]))
    if any(one.key != job.key() for one in found):
        return []
    for one in found:
        if damage := one.damage(job.output_prefix.parent):
            raise DatasetError(
                f"{job.output_prefix.with_name(one.prefix)} was finished before, but is damaged: "
                f"{damage}; move the files of the pair away and run the same command again"
            )
    return found


def _claim(job: Preparation, say: Say) -> dict[int, Facts]:
    """Return the parts that an earlier run of the same job finished; else begin anew.

    Work of other options is dropped when no part of it was finished: nothing is lost.

    Raises:
        DatasetError: The folder holds the work of a job with other settings or something that no
            job put there, or files that are none of its work have the names of the output.
    """
    folder, plan_path = job.work_folder, job.work_folder / PLAN_NAME
    if plan_path.exists():
        changes = _changes(job, read_json(plan_path))
        if not changes:
            if done := finished_parts(folder):
                say(f"going on: {len(done):,} parts in {folder} are done")
            return done
        if any(folder.glob(f"*{PART}")):
            raise DatasetError(
                f"{folder} holds unfinished work begun with other options "
                f"({changes[0]}): give those again to go on, or delete that folder"
            )
    _require_free(job)
    _clear(folder)
    with writing(plan_path):
        write_json(plan_path, job.plan())
    return {}


def _changes(job: Preparation, before: dict[str, Any]) -> list[str]:
    if not before:
        return ["its plan cannot be read"]
    pairs = [(name, before.get(name), value) for name, value in job.plan().items()]
    names = {"input": "the input files then"}
    return [names.get(name, f"{name} = {old!r} then") for name, old, new in pairs if old != new]


def _require_free(job: Preparation) -> None:
    for key in job.reading.keys:
        for path_of in (bin_path, idx_path, manifest.path_of):
            if (path := path_of(job.prefix(key))).exists():
                raise DatasetError(
                    f"{path} is there already, of other text or options: "
                    "give another --output-prefix, or move it away"
                )


def _clear(folder: Path) -> None:
    """Empty a work folder of all but the lock; the plan last, so that it stays ours till then."""
    ours = (PLAN_NAME, f".{PLAN_NAME}", LOCK_NAME, "tokenizer.", "unfinished-")
    for path in folder.iterdir():
        if not (path.name.startswith(ours) or path.suffix in (PART, UNFINISHED)):
            raise DatasetError(f"{folder} is for unfinished work; what is {path.name} in it?")
    for path in folder.iterdir():
        if path.name not in (LOCK_NAME, PLAN_NAME):
            path.unlink()
    (folder / PLAN_NAME).unlink(missing_ok=True)


def _texts_to_learn_from(job: Preparation, say: Say) -> Iterator[str]:
    """Return the first texts of the input.

    Raises:
        DatasetError: There is none: a vocabulary of single bytes would be learnt.
    """
    say(f"learning the vocabulary from at most {TRAIN_BYTES / MEGABYTE:,.0f} MB")
    bad: list[Bad] = []
    texts = _first_texts(job, bad)
    first = next(filter(None, texts), None)
    if first is None:
        raise _no_text(job, job.reading.keys[0], bad)
    return itertools.chain([first], texts)


def _first_texts(job: Preparation, bad: list[Bad]) -> Iterator[str]:
    left = TRAIN_BYTES
    with closing(blocks(job.reading)) as all_blocks:
        for block in all_blocks:
            for record in block.records(job.reading.keys, bad):
                for text in (text for texts in record.texts.values() for text in texts):
                    yield text
                    left -= len(text)
            if left <= 0:
                return


def _make_parts(job: Preparation, task: BlockEncoder, done: dict[int, Facts]) -> dict[int, Facts]:
    bar = progress("encoding", job.reading.total_bytes)
    made: dict[int, Facts] = {}

    def missing() -> Generator[Block, None, None]:
        for block in blocks(job.reading):
            if block.number not in done:
                yield block

    with closing(ordered(task.encode, missing(), job.workers)) as results:
        for facts in results:
            made[facts.number] = facts
            bar.update(facts.consumed_bytes - bar.n)
    bar.close()
    return made


def _require_text(job: Preparation, facts: list[Facts]) -> None:
    """Check that every key has text; parts without any are of no use and cleared."""
    for number, key in enumerate(job.reading.keys):
        if not any(one.text_bytes[number] for one in facts):
            _clear(job.work_folder)
            raise _no_text(job, key, [bad for one in facts for bad in one.bad])


def _no_text(job: Preparation, key: str, bad: Sequence[Bad]) -> DatasetError:
    wrong, keys = job.reading.explained(bad[0]) if bad else ("", "")
    first = f" ({wrong}){keys}" if bad else ""
    advice = ": give --json-keys" if keys and not keys.endswith(NESTED) else ""
    return DatasetError(f"the input holds no text under '{key}'{first}{advice}")


def _require_unchanged(job: Preparation) -> None:
    """Check that the input is still what the plan says: parts of two versions belong to none."""
    for file in job.reading.files:
        try:
            now = file.path.stat()
        except OSError:
            now = None
        if now is None or (now.st_size, now.st_mtime_ns) != (file.size_bytes, file.modified_ns):
            raise DatasetError(
                f"{file.path} changed while it was read: delete {job.work_folder} and run the "
                "same command again when nothing writes the file any more"
            )


def _damaged_files(job: Preparation, facts: list[Facts]) -> list[str]:
    """Say of which files more than a few records were no documents."""
    records, bad = Counter[int](), Counter[int]()
    for file, count, num_bad in (row for one in facts for row in one.of_files):
        records[file] += count
        bad[file] += num_bad
    files = job.reading.files
    said = (files[file].damage(records[file], bad[file]) for file in sorted(bad))
    return [sentence for sentence in said if sentence]


def list_bad_lines(job: Preparation, facts: list[Facts]) -> None:
    """Write down which lines were no documents, if any were not."""
    if not any(one.num_bad for one in facts):
        return
    path = job.bad_lines_path
    with writing(path), path.open("w", encoding="utf-8") as file:
        for one in facts:
            file.writelines(f"{job.reading.words(bad)}\n" for bad in one.bad)
            if one.num_bad > len(one.bad):
                file.write(f"and {one.num_bad - len(one.bad)} more before the next line\n")


@dataclass(frozen=True)
class BlockEncoder:
    """Common to all blocks of a job; worker processes get it."""

    folder: Path
    tokenizer: Path
    keys: tuple[str, ...]
    append_eod: bool

    def encode(self, block: Block) -> Facts:
        """Write the part of a block."""
        tokenizer = _opened(self.tokenizer)
        eod = np.array([required_eod(tokenizer)] if self.append_eod else [], np.uint32)
        collected = [_Documents() for _ in self.keys]
        empty = 0
        bad: list[Bad] = []
        for record in block.records(self.keys, bad):
            has_text = False
            for key, documents in zip(self.keys, collected, strict=True):
                texts = record.texts.get(key, [])
                has_text |= documents.add(texts, tokenizer, eod)
            empty += not has_text
        counts, bad_of = Counter(raw[0] for raw in block.raw), Counter(one[0] for one in bad)
        keys = [one.arrays(indexed.id_type(tokenizer.vocab_size)) for one in collected]
        facts = Facts(
            number=block.number,
            consumed_bytes=block.consumed_bytes,
            text_bytes=[one.text_bytes for one in collected],
            tokens=sum(len(ids) for _, _, ids in keys),
            empty=empty,
            num_bad=len(bad),
            bad=bad[:MOST_BAD_LISTED],
            of_files=[(file, count, bad_of[file]) for file, count in sorted(counts.items())],
        )
        write_part(self.folder, facts, keys)
        return facts


@cache
def _opened(path: Path) -> Tokenizer:
    return load(path)


@dataclass
class _Documents:
    """Documents of one key while a block is worked on."""

    lengths: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    ids: list[NDArray[Any]] = field(default_factory=list)
    text_bytes: int = 0

    def add(self, texts: list[str], tokenizer: Tokenizer, eod: NDArray[Any]) -> bool:
        """Add the document that some texts are; return whether it has a token."""
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
            # End-of-document belongs to the last sequence, else document k would be read from k
            # tokens too early.
            self.lengths[-1] += len(eod)
            self.counts.append(count)
        return count > 0

    def arrays(self, dtype: np.dtype[Any]) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        ids = np.concatenate(self.ids) if self.ids else np.empty(0)
        return np.array(self.lengths, np.int32), np.array(self.counts, np.int32), ids.astype(dtype)


def write_part(folder: Path, facts: Facts, keys: Sequence[Sequence[NDArray[Any]]]) -> None:
    """Write a part, a file of NumPy's with checksums; killed, it leaves a whole one or none.

    Args:
        folder: The work folder.
        facts: What is known of it.
        keys: For each key its `ARRAYS`.
    """
    record = np.frombuffer(json.dumps(asdict(facts)).encode(), np.uint8)
    arrays: dict[str, Any] = {
        f"{name}-{key}": array
        for key, some in enumerate(keys)
        for name, array in zip(ARRAYS, some, strict=True)
    }
    path = part_path(folder, facts.number)
    unfinished = path.with_suffix(UNFINISHED)
    with writing(path), unfinished.open("wb") as file:
        np.savez(file, record=record, **arrays)
    unfinished.replace(path)


def part_path(folder: Path, number: int) -> Path:
    """Return where a part lies."""
    return folder / f"{number:08}{PART}"


def finished_parts(folder: Path) -> dict[int, Facts]:
    """Return the whole parts of a work folder; what is damaged is as good as not there."""
    found = {}
    for path in sorted(folder.glob(f"*{PART}")):
        try:
            with path.open("rb") as file, np.load(file) as arrays:
                values = json.loads(arrays["record"].tobytes())
                rows = {name: [tuple(one) for one in values[name]] for name in ("bad", "of_files")}
                facts = Facts(**values | rows)
                for name in (f"{n}-{key}" for n in ARRAYS for key in range(len(facts.text_bytes))):
                    arrays[name]  # reading an array to its end holds it against its checksum
        except DAMAGE:
            continue
        if path == part_path(folder, facts.number):
            found[facts.number] = facts
    return found


def _read_part(path: Path, name: str, key: int) -> NDArray[Any]:
    with np.load(path) as arrays:
        found: NDArray[Any] = arrays[f"{name}-{key}"]
    return found


def _join(
    job: Preparation, facts: Sequence[Facts], tokenizer: Tokenizer, damaged: list[str]
) -> list[Manifest]:
    """Make the pair of every key; killed at any moment, the same call makes the same files.

    The manifest comes last: a pair with a manifest is finished.
    """
    pairs = [_pair(job, number, facts, tokenizer) for number in range(len(job.reading.keys))]
    made = [pair.model_copy(update={"damaged_input": tuple(damaged)}) for pair in pairs]
    for one in made:
        one.publish(job.output_prefix.with_name(one.prefix))
    return made


def _pair(job: Preparation, number: int, facts: Sequence[Facts], tokenizer: Tokenizer) -> Manifest:
    paths = [part_path(job.work_folder, one.number) for one in facts]
    dtype = indexed.id_type(tokenizer.vocab_size)
    draft = job.work_folder / f"unfinished-{number}"
    lengths, per_document = (
        partial(map, partial(_read_part, name=name, key=number), paths)
        for name in ("lengths", "counts")
    )
    counts = indexed.write_index(idx_path(draft), dtype, lengths, per_document)
    with writing(bin_path(draft)), bin_path(draft).open("wb") as file:
        num_bytes = sum(file.write(_read_part(path, "ids", number).data) for path in paths)
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
