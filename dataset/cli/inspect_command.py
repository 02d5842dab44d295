"""``python -m dataset inspect PREFIX``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dataset.cli.output import say
from dataset.cli.types import prefix

if TYPE_CHECKING:
    from dataset.tokenizer.base import Tokenizer

FOUND_DAMAGE = 1


def add(commands: Any) -> None:  # noqa: ANN401 - argparse's class for it is private
    """Add the command to a parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "inspect",
        help="show and check a .bin/.idx pair",
        description="Shows documents, tokens and the beginning of a document, and checks the "
        "files. Exit code 1 means damage was found. A pair that `prepare` did not make brings no "
        "tokenizer; give one to see its text.",
        allow_abbrev=False,
    )
    parser.set_defaults(run=run, after_interrupt="nothing was changed")
    parser.add_argument("prefix", type=prefix, metavar="PREFIX", help="path without .bin and .idx")
    parser.add_argument(
        "--document", type=int, default=0, metavar="N", help="which one to show, from 0"
    )
    parser.add_argument("--vocab-file", type=Path, metavar="FILE", help="vocab.json of GPT-2's BPE")
    parser.add_argument("--merge-file", type=Path, metavar="FILE", help="merges.txt beside it")
    parser.add_argument(
        "--tokenizer-model", type=Path, metavar="FILE", help="SentencePiece, or a tokenizer.json"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    from dataset.inspection import inspect_prefix, is_shifted

    found = inspect_prefix(arguments.prefix, arguments.document, _tokenizer(arguments))
    say(f"prefix      {arguments.prefix}")
    say(f"documents   {found.documents:,}")
    say(
        f"tokens      {found.tokens:,} of {found.id_bytes} bytes, "
        f"longest sequence {found.longest:,}"
    )
    if found.manifest:
        say(f"vocabulary  {found.manifest.vocab_size:,}, end of document {found.manifest.eod}")
        if is_shifted(found.manifest):
            say("lengths     without end-of-document, as --megatron-deepspeed-compat asked for")
    else:
        say("manifest    none for this prefix: checksums, ids and text were not checked")
    if found.sample is not None:
        say(f"document {arguments.document} begins:\n{found.sample}")
    for problem in found.problems:
        say(f"DAMAGED     {problem}")
    if found.problems:
        return FOUND_DAMAGE
    say("checks      all passed")
    return 0


def _tokenizer(arguments: argparse.Namespace) -> Tokenizer | None:
    from dataset.errors import DatasetError
    from dataset.tokenizer.bpe import ByteLevelBpe
    from dataset.tokenizer.choose import load

    if arguments.tokenizer_model:
        return load(arguments.tokenizer_model)
    if not arguments.vocab_file and not arguments.merge_file:
        return None
    if not (arguments.vocab_file and arguments.merge_file):
        raise DatasetError("--vocab-file and --merge-file: give both")
    return ByteLevelBpe.from_gpt2_files(arguments.vocab_file, arguments.merge_file)
