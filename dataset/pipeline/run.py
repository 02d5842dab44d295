"""`prepare --input`: claim the folder, make the missing parts, join."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from dataset import manifest
from dataset.errors import DatasetError
from dataset.files import require_writable
from dataset.indexed import bin_path, idx_path
from dataset.locks import locked
from dataset.manifest import Manifest
from dataset.pipeline import folder, worker
from dataset.pipeline.folder import Done
from dataset.pipeline.job import Job
from dataset.pipeline.join import join
from dataset.pipeline.parts import Facts
from dataset.pool import ordered
from dataset.progress import MEGABYTE, Progress
from dataset.readers.blocks import Block, blocks
from dataset.readers.parse import Record, parse
from dataset.tokenizer.base import Tokenizer
from dataset.tokenizer.choose import DEFAULT_VOCAB_SIZE, load

Say = Callable[[str], None]


@dataclass(frozen=True)
class Finished:
    """What a job came to."""

    manifests: list[Manifest]
    """One for each key."""
    facts: list[Facts]
    """Of all parts; none when an earlier call had finished."""
    new_facts: list[Facts]
    """Of the parts that this call made."""
    seconds: float
    """Spent on those."""
    is_new: bool


def run(job: Job, say: Say, restart: bool = False) -> Finished:
    """Do a job, or what is left of it.

    Args:
        job: What is asked for.
        say: Gets one line for each thing worth telling.
        restart: Drop unfinished work of an earlier run.

    Raises:
        DatasetError: An input, an option or an output is in the way; parts stay where they are.
    """
    require_writable(job.output_prefix, "--output-prefix")
    with locked(job.work_folder, drop_empty=True):
        before = _finished_before(job)
        if before:
            folder.clear(job.work_folder)
            return Finished(before, [], [], 0.0, is_new=False)
        if not restart:
            folder.drop_fruitless(job)
        _require_free(job)
        done = folder.claim(job, restart, say)
        path = job.tokenizer.make(job.work_folder, lambda: _texts_to_learn_from(job, say))
        tokenizer = load(path)
        _tell_if_smaller(job, tokenizer, say)
        eod = -1 if tokenizer.eod is None else tokenizer.eod
        manifest.require_one_vocabulary(job.output_prefix.parent, tokenizer.vocab_size, eod)
        if job.append_eod:
            worker.required_eod(tokenizer)
        begun_s = time.perf_counter()
        made = _make_parts(job, done, path)
        seconds = time.perf_counter() - begun_s
        facts = [one for _, one in sorted((done.facts | made).items())]
        say(f"joining {len(facts):,} parts")
        manifests = join(job, facts, path, tokenizer)
        _list_bad_lines(job, facts)
        folder.clear(job.work_folder)
    return Finished(manifests, facts, list(made.values()), seconds, is_new=True)


def bad_lines_path(job: Job) -> Path:
    """Where records that cannot be used are listed."""
    return job.output_prefix.with_name(f"{job.output_prefix.name}.bad-lines.txt")


def _finished_before(job: Job) -> list[Manifest]:
    found = []
    for key in job.reading.keys:
        prefix = job.prefix(key)
        path = manifest.path_of(prefix)
        if not (path.exists() and bin_path(prefix).exists() and idx_path(prefix).exists()):
            return []
        found.append(manifest.read(path))
    return found if all(one.key == job.key() for one in found) else []


def _require_free(job: Job) -> None:
    if (job.work_folder / folder.PLAN_NAME).exists():
        return  # what lies there is ours: a run was stopped while it joined
    for key in job.reading.keys:
        prefix = job.prefix(key)
        for path in (bin_path(prefix), idx_path(prefix), manifest.path_of(prefix)):
            if path.exists():
                raise DatasetError(
                    f"{path} is there already, of other text or options: "
                    "give another --output-prefix, or move it away"
                )


def _tell_if_smaller(job: Job, tokenizer: Tokenizer, say: Say) -> None:
    asked = job.tokenizer.vocab_size or DEFAULT_VOCAB_SIZE
    if job.tokenizer.learns and tokenizer.vocab_size < asked:
        say(f"the text gave {tokenizer.vocab_size:,} entries, of {asked:,} asked for")


def _texts_to_learn_from(job: Job, say: Say) -> Iterator[str]:
    say(f"learning the vocabulary from at most {job.tokenizer.train_bytes / MEGABYTE:,.0f} MB")
    left = job.tokenizer.train_bytes
    with closing(blocks(job.reading)) as all_blocks:
        for block in all_blocks:
            for text in _texts(block, job.reading.keys):
                yield text
                left -= len(text)
            if left <= 0:
                return


def _texts(block: Block, keys: tuple[str, ...]) -> Iterator[str]:
    for _, piece in block.pieces:
        for found in parse(piece, keys):
            if isinstance(found, Record):
                for texts in found.texts.values():
                    yield from texts


def _make_parts(job: Job, done: Done, path: Path) -> dict[int, Facts]:
    number, start, consumed = done.first_missing()
    reading, wants_stop = job.reading, job.bad_lines == "fail"
    names = tuple(reading.name(file) for file in range(len(reading.files)))
    if wants_stop:
        _require_no_bad(job, done)
    task = worker.Task(
        job.work_folder,
        path,
        reading.keys,
        names,
        job.append_eod,
        job.shifted_lengths,
        wants_stop,
    )
    progress = Progress("encoding", reading.total_bytes, consumed)
    made: dict[int, Facts] = {}
    num_tokens, begun_s = 0, time.monotonic()
    missing = (block for block in blocks(reading, number, start) if block.number not in done.facts)
    with closing(ordered(worker.work, missing, job.workers, worker.start, (task,))) as results:
        for facts in results:
            made[facts.number] = facts
            num_tokens += facts.tokens
            rate = num_tokens / (time.monotonic() - begun_s)
            progress.reach(facts.consumed_bytes, f"{rate / 1e6:.2f} M tokens/s")
    progress.close()
    return made


def _require_no_bad(job: Job, done: Done) -> None:
    for _, facts in sorted(done.facts.items()):
        for file, line, reason in facts.bad:
            raise DatasetError(
                f"{job.reading.name(file)}:{line}: {reason}; --bad-lines skip leaves such lines out"
            )


def _list_bad_lines(job: Job, facts: list[Facts]) -> None:
    if not any(one.num_bad for one in facts):
        return
    with bad_lines_path(job).open("w", encoding="utf-8") as file:
        for one in facts:
            for number, line, reason in one.bad:
                file.write(f"{job.reading.name(number)}:{line}: {reason}\n")
            if one.num_bad > len(one.bad):
                file.write(f"and {one.num_bad - len(one.bad)} more before the next line\n")
