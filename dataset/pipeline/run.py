"""`prepare --input`: claim the folder, make the missing parts, join."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass

from dataset import manifest
from dataset.alive import alive
from dataset.errors import DatasetError
from dataset.files import require_writable, writing
from dataset.indexed import bin_path, idx_path
from dataset.locks import locked
from dataset.manifest import Manifest
from dataset.pipeline.job import Job, claim, clear
from dataset.pipeline.join import join
from dataset.pipeline.parts import Facts
from dataset.pipeline.worker import Task, required_eod
from dataset.pool import ordered
from dataset.progress import MEGABYTE, Progress
from dataset.readers.blocks import Block, blocks
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
        with alive("checking the finished pair"):
            before = _finished_before(job)
        if before:
            clear(job.work_folder)
            return Finished(before, [], [], 0.0, is_new=False)
        done = claim(job, restart, say)
        with alive("making the tokenizer"):
            path = job.tokenizer.make(job.work_folder, lambda: _texts_to_learn_from(job, say))
        tokenizer = load(path)
        asked = job.tokenizer.vocab_size or DEFAULT_VOCAB_SIZE
        if job.tokenizer.learns and tokenizer.vocab_size < asked:
            say(f"the text gave {tokenizer.vocab_size:,} entries, of {asked:,} asked for")
        eod = -1 if tokenizer.eod is None else tokenizer.eod
        manifest.require_one_vocabulary(job.output_prefix.parent, tokenizer.vocab_size, eod)
        if job.append_eod:
            required_eod(tokenizer)
        task = Task(job.work_folder, path, job.reading.keys, job.append_eod, job.shifted_lengths)
        begun_s = time.perf_counter()
        made = _make_parts(job, task, done)
        seconds = time.perf_counter() - begun_s
        facts = [one for _, one in sorted((done | made).items())]
        _require_text(job, facts)
        _require_unchanged(job)
        say(f"joining {len(facts):,} parts")
        with alive("joining"):
            manifests = join(job, facts, tokenizer)
        _list_bad_lines(job, facts)
        clear(job.work_folder)
    return Finished(manifests, facts, list(made.values()), seconds, is_new=True)


def _finished_before(job: Job) -> list[Manifest]:
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


def _texts_to_learn_from(job: Job, say: Say) -> Iterator[str]:
    say(f"learning the vocabulary from at most {job.tokenizer.train_bytes / MEGABYTE:,.0f} MB")
    left = job.tokenizer.train_bytes
    with closing(blocks(job.reading)) as all_blocks:
        for block in all_blocks:
            for record in block.records(job.reading.keys, []):
                for text in (text for texts in record.texts.values() for text in texts):
                    yield text
                    left -= len(text)
            if left <= 0:
                return


def _make_parts(job: Job, task: Task, done: dict[int, Facts]) -> dict[int, Facts]:
    progress = Progress("encoding", job.reading.total_bytes)
    made: dict[int, Facts] = {}
    num_tokens, begun_s = 0, time.monotonic()

    def missing() -> Generator[Block, None, None]:
        for block in blocks(job.reading):
            if block.number not in done:
                yield block
            else:
                progress.reach(block.consumed_bytes, "done before")

    _require_no_bad(job, done.values())
    with closing(ordered(task.encode, missing(), job.workers)) as results:
        for facts in results:
            made[facts.number] = facts
            _require_no_bad(job, [facts])
            num_tokens += facts.tokens
            rate = num_tokens / (time.monotonic() - begun_s)
            progress.reach(facts.consumed_bytes, f"{rate / 1e6:.2f} M tokens/s")
    progress.close()
    return made


def _require_no_bad(job: Job, some: Iterable[Facts]) -> None:
    if job.bad_lines == "fail":
        for bad in (bad for facts in some for bad in facts.bad):
            raise DatasetError(f"{job.reading.words(bad)}; --bad-lines skip leaves such lines out")


def _require_text(job: Job, facts: list[Facts]) -> None:
    """Check that every key has text; parts without any are of no use and cleared."""
    for number, key in enumerate(job.reading.keys):
        if not any(one.text_bytes[number] for one in facts):
            bad = next((bad for one in facts for bad in one.bad), None)
            clear(job.work_folder)
            first = f" ({job.reading.words(bad)})" if bad else ""
            raise DatasetError(f"the input holds no text under '{key}'{first}")


def _require_unchanged(job: Job) -> None:
    """Check that the input is still what the plan says: parts of two versions belong to none."""
    for file in job.reading.files:
        try:
            now = file.path.stat()
        except OSError:
            now = None
        if now is None or (now.st_size, now.st_mtime_ns) != (file.size_bytes, file.modified_ns):
            raise DatasetError(
                f"{file.path} changed while it was read: run the same command with --restart when "
                "nothing writes it any more"
            )


def _list_bad_lines(job: Job, facts: list[Facts]) -> None:
    if not any(one.num_bad for one in facts):
        return
    path = job.bad_lines_path
    with writing(path), path.open("w", encoding="utf-8") as file:
        for one in facts:
            file.writelines(f"{job.reading.words(bad)}\n" for bad in one.bad)
            if one.num_bad > len(one.bad):
                file.write(f"and {one.num_bad - len(one.bad)} more before the next line\n")
