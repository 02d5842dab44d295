"""``python -m dataset prepare``: the default corpus, the paper's, or the user's own text.

Its options are Megatron's where Megatron has them.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dataset.cli.common import add_input, megabytes, output_prefix, positive, say, tell
from dataset.cli.pairs import OSCAR
from dataset.default import cache
from dataset.errors import DatasetError

if TYPE_CHECKING:
    from dataset.pipeline.job import Job
    from dataset.pipeline.run import Finished

SHOWN_BAD_LINES = 5

DESCRIPTION = f"""\
Without --input: makes tokens of the text every Python ships (the default corpus), or, with
'{OSCAR}', of the corpus the paper trains on, which it fetches. With --input: of your own files.
The last lines of stdout are the prefixes of the .bin/.idx pairs, one for each of --json-keys; all
else goes to stderr. A run that was stopped goes on with the same command; a finished one is found.
"""


def add(commands: Any) -> None:  # noqa: ANN401
    """Add the command to a parser."""
    parser = commands.add_parser(
        "prepare", help="text to a .bin/.idx pair", description=DESCRIPTION, allow_abbrev=False
    )
    kept = "finished parts are kept: the same command goes on"
    parser.set_defaults(run=run, after_interrupt=kept)
    parser.add_argument("corpus", nargs="?", choices=[OSCAR], help="a corpus to fetch")
    group = parser.add_argument_group("input")
    add = group.add_argument
    add("--input", nargs="+", metavar="FILE",
        help="files or globs: .jsonl, .json, .txt (each also .xz, .gz or .zst), .parquet",
    )  # fmt: skip
    add("--json-keys", nargs="+", metavar="KEY", help="keys or columns (text)")
    add_input(group)
    add = parser.add_argument_group("tokenizer").add_argument
    add("--tokenizer", "--tokenizer-type", dest="tokenizer", metavar="NAME",
        help="gpt2-bpe (also GPT2BPETokenizer), sentencepiece (also GPTSentencePieceTokenizer), or "
        "train-bpe, train-sentencepiece: learn the vocabulary from the input")  # fmt: skip
    add("--vocab-file", type=Path, metavar="FILE", help="vocab.json of gpt2-bpe")
    add("--merge-file", type=Path, metavar="FILE", help="merges.txt of gpt2-bpe")
    add("--tokenizer-model", type=Path, metavar="FILE", help="of sentencepiece")
    add("--vocab-size", type=positive, help="entries to learn (32000)")
    add("--train-mb", type=megabytes, metavar="MIB", help="text to learn from (256)")
    add("--append-eod", action="store_true", help="close every document")
    add = parser.add_argument_group("output").add_argument
    add(
        "--output-prefix",
        type=output_prefix,
        metavar="P",
        help="writes P_KEY_document.bin and .idx",
    )
    add("--megatron-deepspeed-compat", action="store_true",
        help="leave end-of-document out of the lengths, as Megatron-DeepSpeed's script does: "
        "every document is then read a little too early; only to repeat old runs")  # fmt: skip
    add("--restart", action="store_true", help="drop unfinished work")
    add("--dataset-impl", choices=["mmap"], help="as in Megatron; there is no other")
    add = parser.add_argument_group("default corpus, and corpora to fetch").add_argument
    add("--cache-dir", type=Path, metavar="DIR",
        help=f"where prepared folders lie (default: ${cache.ENVIRONMENT_VARIABLE}, else "
        "dataset/cache in the checkout)")  # fmt: skip
    add("--data-dir", type=Path, metavar="DIR",
        help="where files were put by hand, and fetched ones go (default: the cache folder, and "
        "the hub's own cache, $HF_HOME)")  # fmt: skip
    add("--base-url", metavar="URL", help="fetch from a mirror (default: $HF_ENDPOINT, or the hub)")


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
    from dataset.default.build import prepare
    from dataset.default.embedded import EmbeddedSource

    started_s = time.monotonic()
    done = prepare(EmbeddedSource(), cache.folder_to_use(arguments.cache_dir), tell)
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
    tokenizer = choose.Choice(
        choose.MEGATRON_NAMES.get(arguments.tokenizer, arguments.tokenizer or ""),
        arguments.vocab_file,
        arguments.merge_file,
        arguments.tokenizer_model,
        arguments.vocab_size,
        arguments.train_mb or choose.DEFAULT_TRAIN_BYTES,
    )
    tokenizer.require_files()
    keys = tuple(arguments.json_keys or ["text"])
    for key in keys:
        if keys.count(key) > 1:
            raise DatasetError(f"--json-keys {' '.join(keys)}: '{key}' is there twice")
        if not key or "/" in key or "\0" in key:
            raise DatasetError(f"--json-keys {key!r}: not fit to be part of a file's name")
    if arguments.megatron_deepspeed_compat and not arguments.append_eod:
        raise DatasetError("--megatron-deepspeed-compat: means nothing without --append-eod")
    files = inputs.find(arguments.input, arguments.input_format)
    return Job(
        Reading(files, keys, arguments.sample_by or "document", arguments.part_mb),
        arguments.output_prefix,
        tokenizer,
        arguments.append_eod,
        arguments.megatron_deepspeed_compat,
        arguments.bad_lines,
        arguments.workers or usable_cores(),
    )


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
    arguments.output_prefix = arguments.output_prefix or folder / OSCAR
    return _own_job(arguments)


def _run_job(job: Job, restart: bool) -> int:
    from dataset.pipeline.run import run as run_job

    if not job.append_eod:
        tell("documents will not be closed: --append-eod was not given")
    done = run_job(job, tell, restart)
    for facts in done.manifests:
        tell(
            f"{facts.prefix}: {facts.documents:,} documents, {facts.tokens:,} tokens of "
            f"{facts.text_bytes / 1e6:,.1f} MB of text"
            + ("" if done.is_new else ", finished before")
        )
    if empty := sum(one.empty for one in done.facts):
        tell(f"{empty:,} records without text were left out")
    if num_bad := sum(one.num_bad for one in done.facts):
        tell(f"{num_bad:,} bad lines were left out; they are listed in {job.bad_lines_path}")
        for bad in [bad for facts in done.facts for bad in facts.bad][:SHOWN_BAD_LINES]:
            tell(f"  {job.reading.words(bad)}")
    if done.new_facts:
        tell(_time_line(job, done))
    for key in job.reading.keys:
        say(str(job.prefix(key)))
    return 0


def _time_line(job: Job, done: Finished) -> str:
    """Rates, and where the workers' time went; the rest of it they waited."""
    text_mb = sum(sum(one.text_bytes) for one in done.new_facts) / 1e6
    shares = ", ".join(
        f"{name} {100 * sum(one.seconds[name] for one in done.new_facts) / worked_s:.0f}%"
        for worked_s in [job.workers * done.seconds]
        for name in ("parse", "encode", "write")
    )
    return (
        f"{text_mb:,.1f} MB in {done.seconds:.1f} s, {text_mb / done.seconds:.1f} MB/s with "
        f"{job.workers} workers; their time: {shares}, waiting the rest"
    )
