"""Arguments to commands, results to stdout and all else to stderr, errors to exit codes."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs.cli import EXIT_INTERRUPTED, Parser, complain, count, duration
from configs.files import printable
from dataset.embedded import CACHE_VARIABLE, OSCAR, Corpus, cache_folder
from dataset.files import DatasetError

if TYPE_CHECKING:
    from dataset.prepare import Preparation

FOUND_DAMAGE = 1
SHOWN_BAD_LINES = 5
WEB_PACKAGES = "datatrove==0.10.1 ftfy==6.3.1 py3langid==0.4.0 orjson==3.13.0"

PREPARE = f"""\
Without --input: makes tokens of the text every Python ships (the default corpus), or, with
'{OSCAR}', of the corpus the paper trains on, which it fetches. With --input: of your own files.
The last lines of stdout are the prefixes of the .bin/.idx pairs, one for each of --json-keys; all
else goes to stderr. A run that was stopped goes on with the same command; a finished one is found.
Exit code 1: the pairs are there, but of a file more than a few records were no documents.
"""
INSPECT = """\
Shows documents, tokens and the beginning of a document, and checks the files. Exit code 1 means
damage was found. A pair that `prepare` did not make brings no tokenizer to show its text with.
"""
MERGE = "Writes one pair with the documents of all, in the order given, and prints its prefix."
CLEAN = """\
Mends wrongly decoded text (ftfy), keeps a language (py3langid) and texts that are long enough, and
keeps one of texts that are alike (MinHash, five-word stretches).
Exit code 1: the texts are there, but of a file more than a few records were no documents.
"""
DECONTAMINATE = """\
Drops texts that share 13 words in a row with evaluation texts.
Exit code 1: the texts are there, but of a file more than a few records were no documents.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        0; 1 when `inspect` found damage, or `prepare`, `clean` or `decontaminate` files of which
        more than a few records are no documents; 130 after Ctrl-C.

    Raises:
        ConfigError: something that the user can mend is wrong.
    """
    arguments = _parser().read(argv)
    try:
        code: int = arguments.run(arguments)
    except KeyboardInterrupt:
        complain(f"dataset {arguments.command}: interrupted; {arguments.after_interrupt}")
        return EXIT_INTERRUPTED
    return code


def _say(line: str) -> None:
    """Print a result, a path as it is."""
    sys.stdout.write(line + "\n")


def _prefix(text: str) -> Path:
    if not Path(text).name:
        raise argparse.ArgumentTypeError(f"{text!r}: give a pair's path without .bin and .idx")
    return Path(text.removesuffix(".bin").removesuffix(".idx")).absolute()


def _output_prefix(text: str) -> Path:
    # `Path` would take the folder's own name for one.
    if not text.strip("./") or text.endswith(("/", "/.", "/..")):
        folder = text.rstrip("/") or "."
        raise argparse.ArgumentTypeError(
            f"{text!r}: end it with a name for the files, such as {folder}/mine"
        )
    return Path(text).absolute()


def _merged_prefix(text: str) -> Path:
    return _prefix(str(_output_prefix(text)))


def _share(text: str) -> float:
    share = duration("", text)
    if share >= 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give a number between 0 and 1")
    return share


def _parser() -> Parser:
    parser = Parser("python -m dataset", "Text to tokens.")
    commands = parser.add_subparsers(dest="command", required=True)

    def add(name: str, run: Any, text: str, description: str, interrupted: str) -> Any:
        one = commands.add_parser(name, help=text, description=description)
        one.set_defaults(run=run, after_interrupt=interrupted)
        return one.add_argument

    kept = "finished parts are kept: the same command goes on"
    _add_prepare(add("prepare", _prepare, "text to a .bin/.idx pair", PREPARE, kept))
    unchanged = "nothing was changed"
    one = add("inspect", _inspect, "show and check a .bin/.idx pair", INSPECT, unchanged)
    one("prefix", type=_prefix, metavar="PREFIX", help="path without .bin and .idx")
    one("--document", type=int, default=0, metavar="N", help="which one to show, from 0")
    one = add("merge", _merge, "join .bin/.idx pairs", MERGE, "nothing was written")
    one("prefixes", nargs="+", type=_prefix, metavar="PREFIX", help="two or more")
    one("--output-prefix", type=_merged_prefix, required=True, metavar="P")
    one = add("clean", _clean, "filter a crawl", CLEAN, kept)
    _add_recipe(one)
    one("--language", default="en", metavar="CODE", help="the language to keep (en)")
    one("--min-words", type=count, default=128, metavar="N", help="drop shorter texts (128)")
    one("--min-chars", type=count, default=512, metavar="N", help="drop shorter texts (512)")
    one("--near-duplicates", type=_share, default=0.9, metavar="SHARE",
        help="of equal five-word stretches at which half of the pairs are found (0.9)")  # fmt: skip
    one = add("decontaminate", _decontaminate, "drop evaluation texts", DECONTAMINATE, kept)
    _add_recipe(one)
    one("--evaluation", nargs="+", required=True, metavar="FILE",
        help="evaluation texts, as for prepare; of a .txt each line is one")  # fmt: skip
    one("--evaluation-keys", nargs="+", default=["text"], metavar="KEY",
        help="fields of its files, each a text by itself (text)")  # fmt: skip
    return parser


def _add_recipe(add: Any) -> None:
    add("--input", nargs="+", required=True, metavar="FILE",
        help="as for prepare; of a .txt each line is one")  # fmt: skip
    add("--output", type=Path, required=True, metavar="FOLDER",
        help="gets NNNNN.jsonl.gz, and in logs/ what is done")  # fmt: skip
    add("--json-key", default="text", metavar="KEY", help="the field to read (text)")
    add("--workers", type=count, help="processes (one a core)")


def _add_prepare(add: Any) -> None:
    add("corpus", nargs="?", choices=[OSCAR], help="a corpus to fetch")
    add("--input", nargs="+", metavar="FILE",
        help="files or globs: .jsonl, .json (JSON lines), .txt (also .xz, .gz or .zst), "
        ".parquet")  # fmt: skip
    add("--json-keys", nargs="+", metavar="KEY", help="keys or columns (text)")
    add("--input-format", choices=["jsonl", "text", "parquet"], help="whatever the names end in")
    add("--sample-by", choices=["document", "paragraph", "line"], default="document",
        help="what of a .txt file is one document (document: the whole file)")  # fmt: skip
    add("--part-mb", type=partial(duration, "MiB"), default=4.0, metavar="MIB",
        help="text that a worker takes at once, never to be redone (4)")  # fmt: skip
    add("--workers", type=count, help="processes (one a core)")
    add("--tokenizer", "--tokenizer-type", dest="tokenizer", metavar="NAME",
        help="gpt2-bpe (also GPT2BPETokenizer), sentencepiece (also GPTSentencePieceTokenizer), or "
        "train-bpe: learn the vocabulary from the input")  # fmt: skip
    add("--vocab-file", type=Path, metavar="FILE", help="vocab.json of gpt2-bpe")
    add("--merge-file", type=Path, metavar="FILE", help="merges.txt of gpt2-bpe")
    add("--tokenizer-model", type=Path, metavar="FILE", help="of sentencepiece")
    add("--vocab-size", type=count, help="entries to learn, of train-bpe (32000)")
    add("--append-eod", action="store_true", help="close every document")
    add("--dataset-impl", choices=["mmap"], help="as Megatron's tool has it; there is no other")
    add("--output-prefix", type=_output_prefix, metavar="P",
        help="writes P_KEY_document.bin and .idx")  # fmt: skip
    add("--cache-dir", type=Path, metavar="DIR",
        help=f"where prepared folders lie (default: ${CACHE_VARIABLE}, else "
        "dataset/cache in the checkout)")  # fmt: skip
    add("--data-dir", type=Path, metavar="DIR",
        help="where files were put by hand, and fetched ones go (default: the cache folder, and "
        "the hub's own cache, $HF_HOME)")  # fmt: skip


def _prepare(arguments: argparse.Namespace) -> int:
    if arguments.corpus and arguments.input:
        raise DatasetError(f"give '{arguments.corpus}' or --input, not both")
    if arguments.input:
        return _run_job(_own_job(arguments))
    if arguments.corpus:
        return _run_job(_oscar_job(arguments))
    for flag in ("output_prefix", "tokenizer", "json_keys", "vocab_file", "tokenizer_model"):
        if getattr(arguments, flag) is not None:
            raise DatasetError(f"--{flag.replace('_', '-')}: only with --input or '{OSCAR}'")
    started_s = time.monotonic()
    corpus = Corpus(cache_folder(arguments.cache_dir))
    facts, is_new = corpus.prepare(complain)
    origin = "built" if is_new else "from the cache"
    complain(
        f"{facts.documents:,} documents, {facts.tokens:,} tokens, {facts.text_bytes:,} bytes of "
        f"text, vocabulary {facts.vocab_size:,}: {origin} in {time.monotonic() - started_s:.1f} s"
    )
    _say(str(corpus.prefix))
    return 0


def _own_job(arguments: argparse.Namespace) -> Preparation:
    from dataset import readers, tokenizer as tokenizers
    from dataset.prepare import Preparation

    if arguments.output_prefix is None:
        raise DatasetError("--output-prefix P: give it; P_text_document.bin and .idx come out")
    tokenizer = tokenizers.Choice(
        tokenizers.MEGATRON_NAMES.get(arguments.tokenizer, arguments.tokenizer or ""),
        arguments.vocab_file,
        arguments.merge_file,
        arguments.tokenizer_model,
        arguments.vocab_size,
    )
    tokenizer.require_files()
    keys = tuple(arguments.json_keys or ["text"])
    for key in keys:
        if keys.count(key) > 1:
            raise DatasetError(f"--json-keys {' '.join(keys)}: '{key}' is there twice")
        if not key or "/" in key or "\0" in key:
            raise DatasetError(f"--json-keys {key!r}: not fit to be part of a file's name")
    files = readers.find(arguments.input, arguments.input_format)
    return Preparation(
        readers.Reading(files, keys, arguments.sample_by, max(1, int(arguments.part_mb * 2**20))),
        arguments.output_prefix,
        tokenizer,
        arguments.append_eod,
        _workers(arguments),
    )


def _workers(arguments: argparse.Namespace) -> int:
    given: int | None = arguments.workers
    return given or len(os.sched_getaffinity(0))


def _oscar_job(arguments: argparse.Namespace) -> Preparation:
    from dataset import fetch

    folder = cache_folder(arguments.cache_dir) / OSCAR
    data = (arguments.data_dir or folder).absolute()
    there = fetch.oscar_text(data)
    has_own = arguments.tokenizer is not None
    wanted = [] if has_own else [fetch.GPT2_VOCABULARY, fetch.GPT2_MERGES]
    if there is None:
        wanted.append(fetch.OSCAR)
    endpoint = fetch.hub_endpoint()
    paths = fetch.fetch(wanted, data, endpoint, arguments.data_dir, complain)
    arguments.input = [str(there or paths[-1])]
    if not has_own:
        arguments.tokenizer = "gpt2-bpe"
        arguments.vocab_file, arguments.merge_file = paths[:2]
    arguments.append_eod = True
    arguments.output_prefix = arguments.output_prefix or folder / OSCAR
    return _own_job(arguments)


def _run_job(job: Preparation) -> int:
    from dataset.prepare import run

    if not job.append_eod:
        complain("documents will not be closed: --append-eod was not given")
    done = run(job, complain)
    for facts in done.manifests:
        complain(
            f"{facts.prefix}: {facts.documents:,} documents, {facts.tokens:,} tokens of "
            f"{facts.text_bytes / 1e6:,.1f} MB of text"
            + ("" if done.facts else ", finished before")
        )
    if empty := sum(one.empty for one in done.facts):
        some = "1 record without text was" if empty == 1 else f"{empty:,} records without text were"
        complain(f"{some} left out")
    if num_bad := sum(one.num_bad for one in done.facts):
        some = "1 bad line was" if num_bad == 1 else f"{num_bad:,} bad lines were"
        complain(f"{some} left out, as listed in {job.bad_lines_path}")
        for bad in [bad for facts in done.facts for bad in facts.bad][:SHOWN_BAD_LINES]:
            complain(f"  {job.reading.words(bad)}")
    for key in job.reading.keys:
        _say(str(job.prefix(key)))
    damaged = done.manifests[0].damaged_input
    for sentence in damaged:
        complain(f"dataset prepare: {sentence}; see {job.bad_lines_path}")
    return FOUND_DAMAGE if damaged else 0


def _inspect(arguments: argparse.Namespace) -> int:
    from dataset.pairs import inspect_pair

    found = inspect_pair(arguments.prefix, arguments.document)
    index, known = found.index, found.manifest
    _say(f"prefix      {arguments.prefix}")
    _say(f"documents   {index.num_documents:,}")
    _say(
        f"tokens      {len(index.ids):,} of {index.ids.itemsize} bytes, "
        f"longest sequence {int(index.lengths.max(initial=0)):,}"
    )
    if known:
        _say(f"vocabulary  {known.vocab_size:,}, end of document {known.eod}")
    else:
        _say("manifest    none for this prefix: checksums, ids and text were not checked")
    if found.sample is not None:
        sample = printable(found.sample, kept="\n\t")
        _say(f"document {arguments.document} begins:\n{sample}")
    for problem in found.problems:
        _say(f"DAMAGED     {problem}")
    if found.problems:
        return FOUND_DAMAGE
    _say("checks      all passed")
    return 0


def _merge(arguments: argparse.Namespace) -> int:
    from dataset.pairs import merge

    if len(arguments.prefixes) < 2:
        raise DatasetError("give two prefixes or more")
    counts = merge(arguments.prefixes, arguments.output_prefix)
    complain(f"{counts.documents:,} documents, {counts.tokens:,} tokens")
    _say(str(arguments.output_prefix))
    return 0


def web_steps() -> Any:
    """Return the module of the recipe, whose packages may be missing."""
    try:
        from dataset import web
    except ImportError as error:
        raise DatasetError(
            f"needs packages that are not here ({error}): pip install {WEB_PACKAGES}"
        ) from error
    return web


def _clean(arguments: argparse.Namespace) -> int:
    web = web_steps()
    cleaning = web.Cleaning(
        arguments.language, arguments.min_words, arguments.min_chars, arguments.near_duplicates
    )
    return _recipe(arguments, web.clean, cleaning)


def _decontaminate(arguments: argparse.Namespace) -> int:
    from dataset.readers import Reading, find

    files = find(arguments.evaluation, flag="--evaluation")
    evaluation = Reading(files, tuple(arguments.evaluation_keys), "line")
    return _recipe(arguments, web_steps().decontaminate, evaluation)


def _recipe(arguments: argparse.Namespace, run: Any, how: Any) -> int:
    from dataset.readers import find

    output = arguments.output.absolute()
    counts: Mapping[str, int] = run(
        find(arguments.input), arguments.json_key, output, _workers(arguments), how
    )
    damaged = [name for name in sorted(counts) if name.startswith(web_steps().DAMAGED)]
    for name, number in sorted(counts.items()):
        if name not in damaged:
            complain(f"{name:28} {number:>12,}")
    _say(f"{output}/*.jsonl.gz")
    for name in damaged:
        complain(f"dataset {arguments.command}: {name.removeprefix(web_steps().DAMAGED)}")
    return FOUND_DAMAGE if damaged else 0
