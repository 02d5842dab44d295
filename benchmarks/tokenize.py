"""Text to tokens beside Megatron's method: ``python -m benchmarks.tokenize --text F.jsonl ...``.

Megatron's ``preprocess_data.py`` sends lines to a pool of processes; each encodes one document at a
time with a GPT-2 tokenizer written in Python (a regular expression for words, byte-pair merges
cached by word) and sends lists of ids back to one process, which writes them. Its tokenizer can be
loaded from the user's own checkout (``--megatron-tokenizer .../gpt2_tokenization.py``); without one
the method is repeated here in the same words.

Both sides take the same text with the same number of workers, in turns, each in a process of its
own; they must write the same bytes, or there is no figure. Counted is what follows the imports.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import lzma
import math
import multiprocessing
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.report import BenchmarkError
from benchmarks.timing import Times
from dataset.errors import DatasetError
from dataset.files import file_digest
from dataset.indexed import bin_path, idx_path
from dataset.pipeline.job import Job
from dataset.pipeline.run import run
from dataset.readers import inputs
from dataset.readers.blocks import Reading
from dataset.tokenizer.bpe import BYTES, ByteLevelBpe
from dataset.tokenizer.choose import Choice

LINES_AT_ONCE = 32  # Megatron's
EXIT_USAGE, EXIT_INTERRUPTED = 2, 130
SIDES = ("megatron", "ours")


class PythonGpt2:
    """GPT-2's tokenizer in plain Python, its words cached, as Megatron carries it."""

    def __init__(self, vocab_file: Path, merge_file: Path) -> None:
        import regex  # type: ignore[import-untyped]

        self._ids: dict[str, int] = json.loads(vocab_file.read_text(encoding="utf-8"))
        merges = merge_file.read_text(encoding="utf-8").split("\n")[1:-1]
        self._ranks = {tuple(merge.split()): rank for rank, merge in enumerate(merges)}
        self._letters = {byte: letter for letter, byte in BYTES.items()}
        self._words = regex.compile(
            r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
        )
        self._merged = cache(self._merge)

    def encode(self, text: str) -> list[int]:
        """Ids of a text."""
        ids: list[int] = []
        for word in self._words.findall(text):
            letters = "".join(self._letters[byte] for byte in word.encode())
            ids.extend(self._ids[token] for token in self._merged(letters))
        return ids

    def _merge(self, word: str) -> list[str]:
        tokens = list(word)
        while len(tokens) > 1:
            pairs = set(pairwise(tokens))
            best = min(pairs, key=lambda pair: self._ranks.get(pair, len(self._ranks)))
            if best not in self._ranks:
                break
            merged, at = [], 0
            while at < len(tokens):
                is_pair = tuple(tokens[at : at + 2]) == best
                merged.append("".join(best) if is_pair else tokens[at])
                at += 2 if is_pair else 1
            tokens = merged
        return tokens


def _megatron_tokenizer(path: Path | None, vocab: Path, merges: Path) -> Any:  # noqa: ANN401
    if path is None:
        return PythonGpt2(vocab, merges)
    spec = importlib.util.spec_from_file_location("gpt2_tokenization", path)
    if spec is None or spec.loader is None:
        raise BenchmarkError(f"--megatron-tokenizer {path}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.GPT2Tokenizer(str(vocab), str(merges))


_encode: Callable[[str], list[int]]
_eod: int


def _start(arguments: argparse.Namespace) -> None:
    global _encode, _eod
    tokenizer = _megatron_tokenizer(
        arguments.megatron_tokenizer, arguments.vocab_file, arguments.merge_file
    )
    _encode = tokenizer.encode
    _eod = json.loads(arguments.vocab_file.read_text(encoding="utf-8"))["<|endoftext|>"]


def _encode_line(line: str) -> tuple[list[int], list[int], int]:
    ids = _encode(json.loads(line)["text"])
    if ids:
        ids.append(_eod)
    return ids, [len(ids)] if ids else [], len(line)


def _run_megatron(arguments: argparse.Namespace, prefix: Path) -> float:
    """Do as ``preprocess_data.py`` does; returns seconds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    begun_s = time.perf_counter()
    pool = multiprocessing.get_context("fork").Pool(arguments.workers, _start, (arguments,))
    builder = IndexedDatasetBuilder(str(bin_path(prefix)), dtype=DType.optimal_dtype(50257))
    with arguments.text.open(encoding="utf-8") as lines, pool:
        for ids, lengths, _ in pool.imap(_encode_line, lines, LINES_AT_ONCE):
            builder.add_document(ids, lengths)
    builder.finalize(str(idx_path(prefix)))
    return time.perf_counter() - begun_s


def _run_ours(arguments: argparse.Namespace, prefix: Path) -> float:
    """Do as ``python -m dataset prepare`` does; returns seconds."""
    begun_s = time.perf_counter()
    job = Job(
        Reading(inputs.find([str(arguments.text)])),
        prefix,
        Choice("gpt2-bpe", arguments.vocab_file, arguments.merge_file),
        append_eod=True,
        workers=arguments.workers,
    )
    run(job, lambda line: None)
    return time.perf_counter() - begun_s


def _one(arguments: argparse.Namespace) -> None:
    """Run one side in this process and print what it took and wrote."""
    with tempfile.TemporaryDirectory() as folder:
        prefix = Path(folder) / "out"
        if arguments.side == "ours":
            seconds = _run_ours(arguments, prefix)
            prefix = prefix.with_name("out_text_document")
        else:
            seconds = _run_megatron(arguments, prefix)
        digests = [file_digest(path_of(prefix)) for path_of in (bin_path, idx_path)]
        tokens = bin_path(prefix).stat().st_size // 2
    sys.stdout.write(json.dumps({"seconds": seconds, "digests": digests, "tokens": tokens}) + "\n")


def _repeated(source: Path, target: Path, num_bytes: int) -> int:
    """Write at least ``num_bytes`` of a corpus's lines, over and over; returns bytes."""
    opener = lzma.open if source.suffix == ".xz" else open
    with opener(source, "rb") as file:
        lines = [line.rstrip(b"\n") + b"\n" for line in file]
    if not any(line.strip() for line in lines):
        raise BenchmarkError(f"--text {source}: holds no lines")
    written = 0
    with target.open("wb") as out:
        while written < num_bytes:
            written += sum(map(out.write, lines))
    return written


def _side(arguments: argparse.Namespace, side: str, text: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.tokenize", "--side", side, "--text", str(text)]
    for flag in ("vocab_file", "merge_file", "megatron_tokenizer", "workers"):
        if (value := getattr(arguments, flag)) is not None:
            command += [f"--{flag.replace('_', '-')}", str(value)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise BenchmarkError(f"{side} ended with status {done.returncode}: {last}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def _check(arguments: argparse.Namespace) -> None:
    """Refuse here what would let a worker die: a pool starts new ones for ever."""
    for flag in ("text", "vocab_file", "merge_file", "megatron_tokenizer"):
        path = getattr(arguments, flag)
        if path is not None and not path.is_file():
            raise BenchmarkError(f"--{flag.replace('_', '-')} {path}: no such file")
    for flag in ("workers", "repeats", "megabytes"):
        if not 0 < getattr(arguments, flag) < math.inf:  # not a number is neither
            raise BenchmarkError(f"--{flag} {getattr(arguments, flag)}: give a number above 0")
    try:
        vocabulary = ByteLevelBpe.from_gpt2_files(arguments.vocab_file, arguments.merge_file)
    except DatasetError as error:
        raise BenchmarkError(f"--vocab-file, --merge-file: {error}") from error
    if vocabulary.eod is None:
        raise BenchmarkError(f"--vocab-file {arguments.vocab_file}: has no <|endoftext|>")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tokenize",
        description="Text to tokens: Megatron's method and ours in turns, on the same text.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--text", type=Path, required=True, help="JSON lines, plain or .xz")
    add("--vocab-file", type=Path, required=True, help="GPT-2's vocab.json")
    add("--merge-file", type=Path, required=True, help="GPT-2's merges.txt")
    add(
        "--megatron-tokenizer",
        type=Path,
        help="Megatron's gpt2_tokenization.py [its method, written anew]",
    )
    add("--workers", type=int, default=2, help="processes of each side [2]")
    add("--repeats", type=int, default=5, help="turns [5]")
    add("--megabytes", type=float, default=50, help="of text, by repeating it [50]")
    add("--side", choices=SIDES, help=argparse.SUPPRESS)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Compare, and print a table; returns the exit status."""
    arguments = _parser().parse_args(argv)
    try:
        if arguments.side:
            _one(arguments)
        else:
            _check(arguments)
            _compare(arguments)
    except (BenchmarkError, DatasetError, OSError, lzma.LZMAError) as error:
        sys.stderr.write(f"benchmarks.tokenize: {error}\n")
        return EXIT_USAGE
    except KeyboardInterrupt:
        sys.stderr.write("benchmarks.tokenize: interrupted\n")
        return EXIT_INTERRUPTED
    return 0


def _compare(arguments: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text.jsonl"
        megabytes = _repeated(arguments.text, text, int(arguments.megabytes * 1e6)) / 1e6
        results: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
        for _ in range(arguments.repeats):
            for side in SIDES:
                results[side].append(_side(arguments, side, text))
    written = {tuple(one["digests"]) for ones in results.values() for one in ones}
    if len(written) > 1:
        raise BenchmarkError("the two sides wrote different files: no figure")
    times = {side: Times(tuple(one["seconds"] for one in ones)) for side, ones in results.items()}
    tokens = results["ours"][0]["tokens"]
    say = sys.stdout.write
    say(f"{megabytes:.1f} MB of JSON lines, {tokens:,} tokens, {arguments.workers} workers, ")
    say(f"{arguments.repeats} turns, equal .bin and .idx\n")
    for side, taken in times.items():
        low, high = taken.quartiles_s
        say(
            f"{side:10} {taken.median_s:7.2f} s ({low:.2f} to {high:.2f})"
            f"  {megabytes / taken.median_s:6.1f} MB/s"
            f"  {tokens / taken.median_s / 1e6:5.2f} M tokens/s\n"
        )
    say(f"ratio      {times['megatron'].ratio_to(times['ours']):7.2f}\n")


if __name__ == "__main__":
    sys.exit(main())
