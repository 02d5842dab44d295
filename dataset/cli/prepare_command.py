"""``python -m dataset prepare``: the default corpus, the paper's, or the user's own text."""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dataset.cli.output import say, tell
from dataset.cli.prepare_arguments import OSCAR, add_parser
from dataset.default import cache
from dataset.errors import DatasetError

if TYPE_CHECKING:
    from dataset.pipeline.job import Job
    from dataset.pipeline.run import Finished

SHOWN_BAD_LINES = 5


def add(commands: Any) -> None:  # noqa: ANN401 - argparse's class for it is private
    """Add the command to a parser."""
    add_parser(commands).set_defaults(
        run=run, after_interrupt="finished parts are kept: the same command goes on"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    if arguments.corpus and arguments.input:
        raise DatasetError(f"give '{arguments.corpus}' or --input, not both")
    if arguments.input:
        return _run_job(_own_job(arguments), arguments.restart)
    if arguments.corpus:
        return _run_job(_oscar_job(arguments), arguments.restart)
    for flag in ("output_prefix", "tokenizer", "json_keys", "vocab_file", "tokenizer_model"):
        if getattr(arguments, flag) is not None:
            raise DatasetError(f"--{flag.replace('_', '-')}: only with --input or '{OSCAR}'")
    return _run_default(arguments)


def _run_default(arguments: argparse.Namespace) -> int:
    from dataset.default.build import Settings, prepare
    from dataset.default.embedded import EmbeddedSource

    started_s = time.monotonic()
    folder = cache.folder_to_use(arguments.cache_dir)
    done = prepare(EmbeddedSource(), Settings(), folder, tell)
    facts = done.manifest
    origin = "built" if done.is_new else "from the cache"
    tell(
        f"{facts.documents:,} documents, {facts.tokens:,} tokens, {facts.text_bytes:,} bytes of "
        f"text, vocabulary {facts.vocab_size:,}: {origin} in {time.monotonic() - started_s:.1f} s"
    )
    say(str(done.prefix))
    return 0


def _own_job(arguments: argparse.Namespace) -> Job:
    from dataset.pipeline.job import Job
    from dataset.pool import usable_cores
    from dataset.readers import inputs
    from dataset.readers.blocks import Reading
    from dataset.tokenizer import choose

    if arguments.output_prefix is None:
        raise DatasetError("--output-prefix P: give it; P_text_document.bin and .idx come out")
    if arguments.tokenizer is None:
        raise DatasetError(f"--tokenizer NAME: give one of {', '.join(choose.NAMES)}")
    name = choose.MEGATRON_NAMES.get(arguments.tokenizer, arguments.tokenizer)
    if name not in choose.NAMES:
        raise DatasetError(f"--tokenizer {name}: not one of {', '.join(choose.NAMES)}")
    tokenizer = choose.Choice(
        name,
        arguments.vocab_file,
        arguments.merge_file,
        arguments.tokenizer_model,
        arguments.vocab_size,
        arguments.train_mb or choose.DEFAULT_TRAIN_BYTES,
    )
    tokenizer.require_files()
    keys = tuple(arguments.json_keys or ["text"])
    _require_keys(keys)
    reading = Reading(
        inputs.find(arguments.input, arguments.input_format),
        keys,
        arguments.sample_by or "document",
    )
    if arguments.part_mb:
        reading = replace(reading, block_bytes=arguments.part_mb)
    if arguments.megatron_deepspeed_compat and not arguments.append_eod:
        raise DatasetError("--megatron-deepspeed-compat: means nothing without --append-eod")
    return Job(
        reading,
        arguments.output_prefix.absolute(),
        tokenizer,
        arguments.append_eod,
        arguments.megatron_deepspeed_compat,
        arguments.bad_lines,
        arguments.workers or usable_cores(),
    )


def _require_keys(keys: tuple[str, ...]) -> None:
    for key in keys:
        if keys.count(key) > 1:
            raise DatasetError(f"--json-keys {' '.join(keys)}: '{key}' is there twice")
        if not key or "/" in key or "\0" in key:
            raise DatasetError(f"--json-keys {key!r}: not fit to be part of a file's name")


def _oscar_job(arguments: argparse.Namespace) -> Job:
    from dataset import fetch

    folder = cache.folder_to_use(arguments.cache_dir) / OSCAR
    data = (arguments.data_dir or folder).absolute()
    there = fetch.oscar_text(data)
    has_own = arguments.tokenizer is not None
    wanted = [] if has_own else [fetch.GPT2_VOCABULARY, fetch.GPT2_MERGES]
    if there is None:
        wanted.append(fetch.OSCAR)
    endpoint = fetch.hub_endpoint(arguments.base_url)
    paths = fetch.fetch(wanted, data, endpoint, arguments.data_dir, tell)
    arguments.input = [str(there or paths[-1])]
    if not has_own:
        arguments.tokenizer = "gpt2-bpe"
        arguments.vocab_file, arguments.merge_file = paths[:2]
    arguments.append_eod = True
    if arguments.output_prefix is None:
        arguments.output_prefix = folder / OSCAR
    return _own_job(arguments)


def _run_job(job: Job, restart: bool) -> int:
    from dataset.pipeline.run import run as run_job

    if not job.append_eod:
        tell("documents will not be closed: --append-eod was not given")
    _tell_result(job, run_job(job, tell, restart))
    for key in job.reading.keys:
        say(str(job.prefix(key)))
    return 0


def _tell_result(job: Job, done: Finished) -> None:
    from dataset.pipeline.run import bad_lines_path

    for facts in done.manifests:
        tell(
            f"{facts.prefix}: {facts.documents:,} documents, {facts.tokens:,} tokens of "
            f"{facts.text_bytes / 1e6:,.1f} MB of text"
            + ("" if done.is_new else ", finished before")
        )
    empty = sum(one.empty for one in done.facts)
    if empty:
        tell(f"{empty:,} records without text were left out")
    num_bad = sum(one.num_bad for one in done.facts)
    if num_bad:
        tell(f"{num_bad:,} bad lines were left out; they are listed in {bad_lines_path(job)}")
        bad = [one for facts in done.facts for one in facts.bad]
        for file, line, reason in bad[:SHOWN_BAD_LINES]:
            tell(f"  {job.reading.name(file)}:{line}: {reason}")
    if done.new_facts:
        tell(_time_line(job, done))


def _time_line(job: Job, done: Finished) -> str:
    """Rates, and where the workers' time went; the rest of it they waited."""
    text_mb = sum(sum(one.text_bytes) for one in done.new_facts) / 1e6
    spent = {
        name: sum(one.seconds[name] for one in done.new_facts)
        for name in ("parse", "encode", "write")
    }
    worked = job.workers * done.seconds
    shares = ", ".join(f"{name} {100 * s / worked:.0f}%" for name, s in spent.items())
    return (
        f"{text_mb:,.1f} MB in {done.seconds:.1f} s, {text_mb / done.seconds:.1f} MB/s with "
        f"{job.workers} workers; their time: {shares}, waiting the rest"
    )
