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

from configs.cli import EXIT_INTERRUPTED, Parser, complain
from configs.files import printable
from dataset.embedded import CACHE_VARIABLE, EMBEDDED, OSCAR, Corpus, cache_folder, prepared
from dataset.files import DatasetError

if TYPE_CHECKING:
    from dataset.prepare import Job
    from dataset.readers import InputFile
    from dataset.tokenizer import Tokenizer

FOUND_DAMAGE = NOT_PREPARED = 1
SHOWN_BAD_LINES = 5
WEB_PACKAGES = "datatrove==0.10.1 trafilatura==2.3.1 ftfy==6.3.1 py3langid==0.4.0 orjson==3.13.0"

PREPARE = f"""\
Without --input: makes tokens of the text every Python ships (the default corpus), or, with
'{OSCAR}', of the corpus the paper trains on, which it fetches. With --input: of your own files.
The last lines of stdout are the prefixes of the .bin/.idx pairs, one for each of --json-keys; all
else goes to stderr. A run that was stopped goes on with the same command; a finished one is found.
"""
INSPECT = """\
Shows documents, tokens and the beginning of a document, and checks the files. Exit code 1 means
damage was found. A pair that `prepare` did not make brings no tokenizer; give one to see its text.
"""
MERGE = "Writes one pair with the documents of all, in the order given, and prints its prefix."
FIND = """\
Prints the prefix of the data, or nothing and exit code 1 when `prepare` has not made it; nothing
is fetched or built.
"""
URLS = "Writes the addresses that may lead to text, each once, in the order in which they come."
DOWNLOAD = """\
Asks for pages, heeding robots.txt, one request a second to a host, and writes their texts with
'id' and 'url'.
"""
CLEAN = """\
Mends wrongly decoded text (ftfy), keeps a language (py3langid) and texts that are long enough, and
keeps one of texts that are alike (MinHash, five-word stretches).
"""
DECONTAMINATE = """\
Cuts out what shares 13 words in a row with evaluation texts, 200 characters on either side too, up
to the ends of sentences; drops stretches under 200 characters, and documents that leave more than
10 pieces. What the input holds 10 times or more is a common phrase and stays.
"""
SHUFFLE = """\
Writes the lines of files in an order that the seed decides. They need not fit into memory.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        0; 1 when `inspect` found damage or `find` nothing; 130 after Ctrl-C.

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


def _number(text: str, least: float, most: float, kind: type = int) -> Any:  # noqa: ANN401
    number = kind(text)
    if not least <= number <= most:  # not a number is neither
        raise argparse.ArgumentTypeError(f"{text}: must be at least {least} and at most {most}")
    return number


# Not so large that memory could not hold what is counted.
_positive = partial(_number, least=1, most=1 << 22)
_count = partial(_number, least=0, most=1 << 22)
_seconds = partial(_number, least=0, most=86_400, kind=float)
_share = partial(_number, least=0.01, most=0.99, kind=float)
_mebibytes = partial(_number, least=1e-6, most=1 << 20, kind=float)
# Each process holds two blocks of text in memory.
_processes = partial(_number, least=1, most=1024)
for _kind in (_positive, _count, _seconds, _share, _mebibytes, _processes):
    _kind.__name__ = "number"  # type: ignore[attr-defined]  # argparse names it


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


def _parser() -> Parser:
    parser = Parser("python -m dataset", "Text to tokens.")
    commands = parser.add_subparsers(dest="command", required=True)

    def add(name: str, run: Any, text: str, description: str, interrupted: str) -> Any:  # noqa: ANN401
        one = commands.add_parser(name, help=text, description=description)
        one.set_defaults(run=run, after_interrupt=interrupted)
        return one.add_argument

    kept = "finished parts are kept: the same command goes on"
    _add_prepare(add("prepare", _prepare, "text to a .bin/.idx pair", PREPARE, kept))
    unchanged = "nothing was changed"
    one = add("inspect", _inspect, "show and check a .bin/.idx pair", INSPECT, unchanged)
    one("prefix", type=_prefix, metavar="PREFIX", help="path without .bin and .idx")
    one("--document", type=int, default=0, metavar="N", help="which one to show, from 0")
    one("--vocab-file", type=Path, metavar="FILE", help="vocab.json of GPT-2's BPE")
    one("--merge-file", type=Path, metavar="FILE", help="merges.txt beside it")
    one("--tokenizer-model", type=Path, metavar="FILE", help="SentencePiece or tokenizer.json")
    one = add("merge", _merge, "join .bin/.idx pairs", MERGE, "nothing was written")
    one("prefixes", nargs="+", type=_prefix, metavar="PREFIX", help="two or more")
    one("--output-prefix", type=_merged_prefix, required=True, metavar="P")
    one = add("find", _find, "print the prefix of prepared data", FIND, unchanged)
    one("name", choices=[EMBEDDED, OSCAR])
    one("--cache-dir", type=Path, metavar="DIR", help="as for prepare")
    one = add("shuffle", _shuffle, "put lines in a random order", SHUFFLE, "nothing was written")
    one("--input", nargs="+", required=True, metavar="FILE", help=".jsonl, or .txt by lines")
    one("--output", type=Path, required=True, metavar="F[.gz]")
    one("--seed", type=_count, required=True, metavar="N", help="decides the order")
    _add_web(add)
    return parser


def _add_web(add: Any) -> None:  # noqa: ANN401
    def of_recipe(name: str, run: Any, text: str, description: str, key: str) -> Any:  # noqa: ANN401
        kept = "finished tasks are kept: the same command goes on"
        one = add(name, run, text, description, kept)
        one("--input", nargs="+", required=True, metavar="FILE",
            help="as for prepare; of a .txt each line is one")  # fmt: skip
        one("--output", type=Path, required=True, metavar="FOLDER",
            help="gets NNNNN.jsonl.gz, and in logs/ what is done")  # fmt: skip
        one("--json-key", default=key, metavar="KEY", help=f"the field to read ({key})")
        one("--workers", type=_processes, help="processes (one a core)")
        return one

    one = of_recipe("urls", _urls, "sift lists of addresses", URLS, "url")
    one("--blacklist", type=Path, metavar="F.toml",
        help="lists 'domains' and 'extensions' in place of dataset/blacklist.toml")  # fmt: skip
    one = of_recipe("download", _download, "texts of the pages of a list", DOWNLOAD, "url")
    one("--user-agent", required=True, metavar="NAME",
        help="who asks, such as 'name/1.0 (+mailto:you@example.org)'")  # fmt: skip
    one("--host-delay", type=_seconds, default=1.0, metavar="S",
        help="between two requests to a host; its robots.txt may ask for more (1)")  # fmt: skip
    one("--at-once", type=_positive, default=32, metavar="N", help="hosts asked at a time (32)")
    one = of_recipe("clean", _clean, "filter a crawl", CLEAN, "text")
    one("--language", default="en", metavar="CODE", help="the language to keep (en)")
    one("--min-words", type=_count, default=128, metavar="N", help="drop shorter texts (128)")
    one("--min-chars", type=_count, default=512, metavar="N", help="drop shorter texts (512)")
    one("--near-duplicates", type=_share, default=0.9, metavar="SHARE",
        help="of equal five-word stretches at which half of the pairs are found (0.9)")  # fmt: skip
    one = of_recipe(
        "decontaminate", _decontaminate, "cut evaluation texts out", DECONTAMINATE, "text"
    )
    one("--evaluation", nargs="+", required=True, metavar="FILE",
        help="evaluation texts, as for prepare; of a .txt each line is one")  # fmt: skip
    one("--evaluation-keys", nargs="+", default=["text"], metavar="KEY",
        help="fields of its files, each a text by itself (text)")  # fmt: skip


def _add_prepare(add: Any) -> None:  # noqa: ANN401
    add("corpus", nargs="?", choices=[OSCAR], help="a corpus to fetch")
    add("--input", nargs="+", metavar="FILE",
        help="files or globs: .jsonl, .json (JSON lines), .txt (also .xz, .gz or .zst), "
        ".parquet")  # fmt: skip
    add("--json-keys", nargs="+", metavar="KEY", help="keys or columns (text)")
    add("--input-format", choices=["jsonl", "text", "parquet"], help="whatever the names end in")
    add("--sample-by", choices=["document", "paragraph", "line"], default="document",
        help="what of a .txt file is one document (document: the whole file)")  # fmt: skip
    add("--bad-lines", choices=["skip", "fail"], default="skip",
        help="leave out lines that cannot be used and list them, or stop (skip)")  # fmt: skip
    add("--part-mb", type=_mebibytes, default=4.0, metavar="MIB",
        help="text that a worker takes at once, never to be redone (4)")  # fmt: skip
    add("--workers", type=_processes, help="processes (one a core)")
    add("--tokenizer", "--tokenizer-type", dest="tokenizer", metavar="NAME",
        help="gpt2-bpe (also GPT2BPETokenizer), sentencepiece (also GPTSentencePieceTokenizer), or "
        "train-bpe: learn the vocabulary from the input")  # fmt: skip
    add("--vocab-file", type=Path, metavar="FILE", help="vocab.json of gpt2-bpe")
    add("--merge-file", type=Path, metavar="FILE", help="merges.txt of gpt2-bpe")
    add("--tokenizer-model", type=Path, metavar="FILE", help="of sentencepiece")
    add("--vocab-size", type=_positive, help="entries to learn, of train-bpe (32000)")
    add("--train-mb", type=_mebibytes, default=256.0, metavar="MIB",
        help="text to learn from (256)")  # fmt: skip
    add("--append-eod", action="store_true", help="close every document")
    add("--output-prefix", type=_output_prefix, metavar="P",
        help="writes P_KEY_document.bin and .idx")  # fmt: skip
    add("--restart", action="store_true", help="drop unfinished work")
    add("--cache-dir", type=Path, metavar="DIR",
        help=f"where prepared folders lie (default: ${CACHE_VARIABLE}, else "
        "dataset/cache in the checkout)")  # fmt: skip
    add("--data-dir", type=Path, metavar="DIR",
        help="where files were put by hand, and fetched ones go (default: the cache folder, and "
        "the hub's own cache, $HF_HOME)")  # fmt: skip
    add("--base-url", metavar="URL", help="fetch from a mirror (default: $HF_ENDPOINT, or the hub)")


def _prepare(arguments: argparse.Namespace) -> int:
    if arguments.corpus and arguments.input:
        raise DatasetError(f"give '{arguments.corpus}' or --input, not both")
    if arguments.input:
        return _run_job(_own_job(arguments), arguments.restart)
    if arguments.corpus:
        return _run_job(_oscar_job(arguments), arguments.restart)
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


def _own_job(arguments: argparse.Namespace) -> Job:
    from dataset import readers, tokenizer as tokenizers
    from dataset.prepare import Job

    if arguments.output_prefix is None:
        raise DatasetError("--output-prefix P: give it; P_text_document.bin and .idx come out")
    tokenizer = tokenizers.Choice(
        tokenizers.MEGATRON_NAMES.get(arguments.tokenizer, arguments.tokenizer or ""),
        arguments.vocab_file,
        arguments.merge_file,
        arguments.tokenizer_model,
        arguments.vocab_size,
        _num_bytes(arguments.train_mb),
    )
    tokenizer.require_files()
    keys = tuple(arguments.json_keys or ["text"])
    for key in keys:
        if keys.count(key) > 1:
            raise DatasetError(f"--json-keys {' '.join(keys)}: '{key}' is there twice")
        if not key or "/" in key or "\0" in key:
            raise DatasetError(f"--json-keys {key!r}: not fit to be part of a file's name")
    files = readers.find(arguments.input, arguments.input_format)
    return Job(
        readers.Reading(files, keys, arguments.sample_by, _num_bytes(arguments.part_mb)),
        arguments.output_prefix,
        tokenizer,
        arguments.append_eod,
        arguments.bad_lines,
        _workers(arguments),
    )


def _num_bytes(mebibytes: float) -> int:
    return max(1, int(mebibytes * (1 << 20)))


def _workers(arguments: argparse.Namespace) -> int:
    given: int | None = arguments.workers
    return given or len(os.sched_getaffinity(0))


def _oscar_job(arguments: argparse.Namespace) -> Job:
    from dataset import fetch

    folder = cache_folder(arguments.cache_dir) / OSCAR
    data = (arguments.data_dir or folder).absolute()
    there = fetch.oscar_text(data)
    has_own = arguments.tokenizer is not None
    wanted = [] if has_own else [fetch.GPT2_VOCABULARY, fetch.GPT2_MERGES]
    if there is None:
        wanted.append(fetch.OSCAR)
    endpoint = fetch.hub_endpoint(arguments.base_url)
    paths = fetch.fetch(wanted, data, endpoint, arguments.data_dir, complain)
    arguments.input = [str(there or paths[-1])]
    if not has_own:
        arguments.tokenizer = "gpt2-bpe"
        arguments.vocab_file, arguments.merge_file = paths[:2]
    arguments.append_eod = True
    arguments.output_prefix = arguments.output_prefix or folder / OSCAR
    return _own_job(arguments)


def _run_job(job: Job, restart: bool) -> int:
    from dataset.prepare import run

    if not job.append_eod:
        complain("documents will not be closed: --append-eod was not given")
    done = run(job, complain, restart)
    for facts in done.manifests:
        complain(
            f"{facts.prefix}: {facts.documents:,} documents, {facts.tokens:,} tokens of "
            f"{facts.text_bytes / 1e6:,.1f} MB of text"
            + ("" if done.facts else ", finished before")
        )
    if empty := sum(one.empty for one in done.facts):
        complain(f"{empty:,} records without text were left out")
    if num_bad := sum(one.num_bad for one in done.facts):
        complain(f"{num_bad:,} bad lines were left out; they are listed in {job.bad_lines_path}")
        for bad in [bad for facts in done.facts for bad in facts.bad][:SHOWN_BAD_LINES]:
            complain(f"  {job.reading.words(bad)}")
    for key in job.reading.keys:
        _say(str(job.prefix(key)))
    return 0


def _inspect(arguments: argparse.Namespace) -> int:
    from dataset.pairs import inspect_pair

    found = inspect_pair(arguments.prefix, arguments.document, _tokenizer(arguments))
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


def _tokenizer(arguments: argparse.Namespace) -> Tokenizer | None:
    from dataset.tokenizer import ByteLevelBpe, load

    if arguments.tokenizer_model:
        return load(arguments.tokenizer_model)
    if not arguments.vocab_file and not arguments.merge_file:
        return None
    if not (arguments.vocab_file and arguments.merge_file):
        raise DatasetError("--vocab-file and --merge-file: give both")
    return ByteLevelBpe.from_gpt2_files(arguments.vocab_file, arguments.merge_file)


def _merge(arguments: argparse.Namespace) -> int:
    from dataset.pairs import merge

    if len(arguments.prefixes) < 2:
        raise DatasetError("give two prefixes or more")
    counts = merge(arguments.prefixes, arguments.output_prefix)
    complain(f"{counts.documents:,} documents, {counts.tokens:,} tokens")
    _say(str(arguments.output_prefix))
    return 0


def _find(arguments: argparse.Namespace) -> int:
    found = prepared(arguments.name, arguments.cache_dir)
    if found is None:
        return NOT_PREPARED
    _say(str(found))
    return 0


def _shuffle(arguments: argparse.Namespace) -> int:
    from dataset.shuffling import shuffle

    output = arguments.output.absolute()
    complain(f"{shuffle(_files(arguments), output, arguments.seed):,} lines")
    _say(str(output))
    return 0


def _files(arguments: argparse.Namespace) -> tuple[InputFile, ...]:
    from dataset.readers import find

    return find(arguments.input)


def _web() -> Any:  # noqa: ANN401
    try:
        from dataset import web
    except ImportError as error:
        raise DatasetError(
            f"needs packages that are not here ({error}): pip install {WEB_PACKAGES}"
        ) from error
    return web


def _urls(arguments: argparse.Namespace) -> int:
    web, output = _web(), arguments.output.absolute()
    blacklist = arguments.blacklist or web.BLACKLIST
    return _told(output, web.sift(_files(arguments), arguments.json_key, output, blacklist))


def _download(arguments: argparse.Namespace) -> int:
    agent = arguments.user_agent.strip()
    if not agent.isascii() or not agent.isprintable() or not agent.partition("/")[0]:
        raise DatasetError(
            f"--user-agent {arguments.user_agent!r}: give a name such as "
            "'name/1.0 (+mailto:you@example.org)'"
        )
    web = _web()
    return _recipe(
        arguments, web.download, web.Download(agent, arguments.host_delay, arguments.at_once)
    )


def _clean(arguments: argparse.Namespace) -> int:
    web = _web()
    cleaning = web.Cleaning(
        arguments.language, arguments.min_words, arguments.min_chars, arguments.near_duplicates
    )
    return _recipe(arguments, web.clean, cleaning)


def _decontaminate(arguments: argparse.Namespace) -> int:
    from dataset.readers import Reading, find

    files = find(arguments.evaluation, flag="--evaluation")
    evaluation = Reading(files, tuple(arguments.evaluation_keys), "line")
    return _recipe(arguments, _web().decontaminate, evaluation)


def _recipe(arguments: argparse.Namespace, run: Any, how: Any) -> int:  # noqa: ANN401
    output, workers = arguments.output.absolute(), _workers(arguments)
    return _told(output, run(_files(arguments), arguments.json_key, output, workers, how))


def _told(output: Path, counts: Mapping[str, int]) -> int:
    for name, number in sorted(counts.items()):
        complain(f"{name:28} {number:>12,}")
    _say(f"{output}/*.jsonl.gz")
    return 0
