"""Options of ``python -m dataset prepare``; Megatron's where it has them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from dataset.cli.types import megabytes, positive
from dataset.default import cache

OSCAR = "oscar-1gb"

DESCRIPTION = f"""\
Without --input: makes tokens of the text every Python ships (the default corpus), or, with
'{OSCAR}', of the corpus the paper trains on, which it fetches. With --input: of your own files.
The last lines of stdout are the prefixes of the .bin/.idx pairs, one for each of --json-keys; all
else goes to stderr. A run that was stopped goes on with the same command; a finished one is found.
"""


def add_parser(commands: Any) -> argparse.ArgumentParser:  # noqa: ANN401 - argparse's is private
    """Add the command's options to a parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "prepare",
        help="text to a .bin/.idx pair",
        description=DESCRIPTION,
        allow_abbrev=False,
    )
    parser.add_argument("corpus", nargs="?", choices=[OSCAR], help="a corpus to fetch")
    _add_input(parser.add_argument_group("input"))
    _add_tokenizer(parser.add_argument_group("tokenizer"))
    _add_output(parser.add_argument_group("output"))
    fetched = parser.add_argument_group("default corpus, and corpora to fetch")
    fetched.add_argument(
        "--cache-dir",
        type=Path,
        metavar="DIR",
        help=f"where prepared folders lie (default: ${cache.ENVIRONMENT_VARIABLE}, else "
        "dataset/cache in the checkout)",
    )
    fetched.add_argument(
        "--data-dir",
        type=Path,
        metavar="DIR",
        help="where files were put by hand, and fetched ones go (default: the cache folder, and "
        "the hub's own cache, $HF_HOME)",
    )
    fetched.add_argument(
        "--base-url",
        metavar="URL",
        help="fetch from a mirror (default: $HF_ENDPOINT, else the hub)",
    )
    return parser


def _add_input(group: Any) -> None:  # noqa: ANN401
    group.add_argument(
        "--input",
        nargs="+",
        metavar="FILE",
        help="files or globs: .jsonl, .json, .txt (each also .xz, .gz or .zst), .parquet",
    )
    group.add_argument("--json-keys", nargs="+", metavar="KEY", help="keys or columns (text)")
    group.add_argument(
        "--input-format", choices=["jsonl", "text", "parquet"], help="whatever the names end in"
    )
    group.add_argument(
        "--sample-by",
        choices=["document", "paragraph", "line"],
        help="what of a .txt file is one document (document: the whole file)",
    )
    group.add_argument(
        "--bad-lines",
        choices=["skip", "fail"],
        default="skip",
        help="leave out lines that cannot be used and list them, or stop at the first (skip)",
    )


def _add_tokenizer(group: Any) -> None:  # noqa: ANN401
    group.add_argument(
        "--tokenizer",
        "--tokenizer-type",
        dest="tokenizer",
        metavar="NAME",
        help="gpt2-bpe (also GPT2BPETokenizer), sentencepiece (also GPTSentencePieceTokenizer), or "
        "train-bpe, train-sentencepiece: learn the vocabulary from the input",
    )
    group.add_argument("--vocab-file", type=Path, metavar="FILE", help="vocab.json of gpt2-bpe")
    group.add_argument("--merge-file", type=Path, metavar="FILE", help="merges.txt of gpt2-bpe")
    group.add_argument("--tokenizer-model", type=Path, metavar="FILE", help="of sentencepiece")
    group.add_argument("--vocab-size", type=positive, help="entries to learn (32000)")
    group.add_argument("--train-mb", type=megabytes, metavar="MIB", help="text to learn from (256)")
    group.add_argument("--append-eod", action="store_true", help="close every document")


def _add_output(group: Any) -> None:  # noqa: ANN401
    group.add_argument(
        "--output-prefix", type=Path, metavar="P", help="writes P_KEY_document.bin and .idx"
    )
    group.add_argument("--workers", type=positive, help="processes that encode (one a core)")
    group.add_argument(
        "--megatron-deepspeed-compat",
        action="store_true",
        help="leave end-of-document out of the lengths, as Megatron-DeepSpeed's script does: "
        "every document is then read a little too early; only to repeat old runs",
    )
    group.add_argument(
        "--part-mb", type=megabytes, metavar="MIB", help="text in a part that is never redone (4)"
    )
    group.add_argument("--restart", action="store_true", help="drop unfinished work")
    group.add_argument("--dataset-impl", choices=["mmap"], help="as in Megatron; there is no other")
