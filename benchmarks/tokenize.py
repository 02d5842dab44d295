"""Text to tokens beside Megatron's method: ``python -m benchmarks.tokenize --text F.jsonl ...``.

Megatron's ``preprocess_data.py`` sends lines to a pool of processes; each encodes one document at a
time with a GPT-2 tokenizer written in Python (a regular expression for words, byte-pair merges
cached by word) and sends lists of ids back to one process, which writes them. Its tokenizer comes
from a checkout (``python third_party/fetch.py megatron-deepspeed``); the pool is repeated here.

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
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from benchmarks.timing import BenchmarkError, Times
from configs.cli import Parser, count, run_command
from dataset.files import DatasetError, file_digest
from dataset.indexed import bin_path, idx_path
from dataset.prepare import Preparation, run
from dataset.readers import Reading, find
from dataset.tokenizer import ByteLevelBpe, Choice

MEGATRON_TOKENIZER = Path(
    "third_party/src/megatron-deepspeed/megatron/tokenizer/gpt2_tokenization.py"
)
LINES_AT_ONCE = 32  # Megatron's


_encode: Callable[[str], list[int]]
_eod: int


def _load(arguments: argparse.Namespace) -> None:
    """Load Megatron's tokenizer; of its checkout, only this file."""
    global _encode, _eod
    path = arguments.megatron_tokenizer
    spec = importlib.util.spec_from_file_location("gpt2_tokenization", path)
    if spec is None or spec.loader is None:
        raise BenchmarkError(f"--megatron-tokenizer {path}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        make = module.GPT2Tokenizer
    except Exception as error:
        raise BenchmarkError(f"--megatron-tokenizer {path}: {error}") from error
    tokenizer = make(str(arguments.vocab_file), str(arguments.merge_file))
    _encode, _eod = tokenizer.encode, tokenizer.encoder["<|endoftext|>"]


def _encode_line(line: str) -> tuple[list[int], list[int], int]:
    ids = _encode(json.loads(line)["text"])
    if ids:
        ids.append(_eod)
    return ids, [len(ids)] if ids else [], len(line)


def _run_megatron(arguments: argparse.Namespace, text: Path, prefix: Path) -> float:
    """Do as ``preprocess_data.py`` does; returns seconds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    begun_s = time.perf_counter()
    _load(arguments)  # the workers inherit it; in each, an error would start a new one for ever
    pool = multiprocessing.get_context("fork").Pool(arguments.workers)
    builder = IndexedDatasetBuilder(str(bin_path(prefix)), dtype=DType.optimal_dtype(50257))
    with text.open(encoding="utf-8") as lines, pool:
        for ids, lengths, _ in pool.imap(_encode_line, lines, LINES_AT_ONCE):
            builder.add_document(ids, lengths)
    builder.finalize(str(idx_path(prefix)))
    return time.perf_counter() - begun_s


def _run_ours(arguments: argparse.Namespace, text: Path, prefix: Path) -> float:
    """Do as ``python -m dataset prepare`` does; returns seconds."""
    begun_s = time.perf_counter()
    job = Preparation(
        Reading(find([str(text)])),
        prefix.with_name("out"),
        Choice("gpt2-bpe", arguments.vocab_file, arguments.merge_file),
        append_eod=True,
        workers=arguments.workers,
    )
    run(job, lambda line: None)
    return time.perf_counter() - begun_s


RUNS = {"megatron": _run_megatron, "ours": _run_ours}


def _one(arguments: argparse.Namespace, side: str, text: Path) -> dict[str, Any]:
    """Run one side, in this process: what it took and wrote."""
    with tempfile.TemporaryDirectory() as folder:
        prefix = Path(folder) / "out_text_document"
        seconds = RUNS[side](arguments, text, prefix)
        digests = tuple(file_digest(path_of(prefix)) for path_of in (bin_path, idx_path))
        tokens = bin_path(prefix).stat().st_size // 2
    return {"seconds": seconds, "digests": digests, "tokens": tokens}


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


def measure_side(arguments: argparse.Namespace, side: str, text: Path) -> dict[str, Any]:
    """Run one side in a process of its own."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh:
        try:
            return fresh.submit(_one, arguments, side, text).result()
        except BrokenProcessPool as error:
            raise BenchmarkError(f"{side}: its process died: {error}") from error


def _check(arguments: argparse.Namespace) -> None:
    """Refuse here what would let a worker die: a pool starts new ones for ever."""
    for flag in ("text", "vocab_file", "merge_file", "megatron_tokenizer"):
        path = getattr(arguments, flag)
        if not path.is_file():
            hint = "; `python third_party/fetch.py megatron-deepspeed` fetches one"
            raise BenchmarkError(
                f"--{flag.replace('_', '-')} {path}: no such file"
                f"{hint if path == MEGATRON_TOKENIZER else ''}"
            )
    if not 0 < arguments.megabytes < math.inf:  # not a number is neither
        raise BenchmarkError(f"--megabytes {arguments.megabytes}: give a number above 0")
    try:
        vocabulary = ByteLevelBpe.from_gpt2_files(arguments.vocab_file, arguments.merge_file)
    except DatasetError as error:
        raise BenchmarkError(f"--vocab-file, --merge-file: {error}") from error
    if vocabulary.eod is None:
        raise BenchmarkError(f"--vocab-file {arguments.vocab_file}: has no <|endoftext|>")


def _parser() -> Parser:
    text = "Text to tokens: Megatron's method and ours in turns, on the same text."
    parser = Parser("python -m benchmarks.tokenize", text)
    add = parser.add_argument
    add("--text", type=Path, required=True, help="JSON lines, plain or .xz")
    add("--vocab-file", type=Path, required=True, help="GPT-2's vocab.json")
    add("--merge-file", type=Path, required=True, help="GPT-2's merges.txt")
    add(
        "--megatron-tokenizer",
        type=Path,
        default=MEGATRON_TOKENIZER,
        help="Megatron's gpt2_tokenization.py [that of third_party/src]",
    )
    add("--workers", type=count, default=2, help="processes of each side [2]")
    add("--repeats", type=count, default=5, help="turns [5]")
    add("--megabytes", type=float, default=50, help="of text, by repeating it [50]")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Compare, and print a table; returns the exit status."""
    arguments = _parser().read(argv)
    _check(arguments)
    _compare(arguments)
    return 0


def _compare(arguments: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text.jsonl"
        megabytes = _repeated(arguments.text, text, int(arguments.megabytes * 1e6)) / 1e6
        results: dict[str, list[dict[str, Any]]] = {side: [] for side in RUNS}
        for _ in range(arguments.repeats):
            for side in RUNS:
                results[side].append(measure_side(arguments, side, text))
    written = {one["digests"] for ones in results.values() for one in ones}
    if len(written) > 1:
        raise BenchmarkError("the two sides wrote different files: no figure")
    times = {side: Times(tuple(one["seconds"] for one in ones)) for side, ones in results.items()}
    tokens = results["ours"][0]["tokens"]
    write = sys.stdout.write
    write(f"{megabytes:.1f} MB of JSON lines, {tokens:,} tokens, {arguments.workers} workers, ")
    write(f"{arguments.repeats} turns, equal .bin and .idx\n")
    for side, taken in times.items():
        low, high = taken.quartiles_s
        write(
            f"{side:10} {taken.median_s:7.2f} s ({low:.2f} to {high:.2f})"
            f"  {megabytes / taken.median_s:6.1f} MB/s"
            f"  {tokens / taken.median_s / 1e6:5.2f} M tokens/s\n"
        )
    write(f"ratio      {times['megatron'].ratio_to(times['ours']):7.2f}\n")


if __name__ == "__main__":
    raise SystemExit(run_command(main, DatasetError, lzma.LZMAError))
