"""Command line: ``python -m dataset prepare`` and ``python -m dataset inspect PREFIX``."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from dataset import cache
from dataset.embedded import EmbeddedSource
from dataset.errors import DatasetError
from dataset.prepare import Settings, prepare

FOUND_DAMAGE = 1
WRONG_USE = 2
INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        0; 1 when `inspect` found damage; 2 when something the user can mend is wrong; 130 after
        Ctrl-C.
    """
    arguments = _parser().parse_args(argv)
    try:
        code: int = arguments.run(arguments)
    except (DatasetError, OSError) as error:
        _tell(f"dataset {arguments.command}: {error}")
        return WRONG_USE
    except KeyboardInterrupt:
        _tell(f"dataset {arguments.command}: interrupted, nothing was published")
        return INTERRUPTED
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m dataset", description="Text to tokens.")
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser(
        "prepare",
        help="make the default corpus and print its prefix",
        description="Makes tokens of the text every Python ships and prints, as the last line of "
        "stdout, the prefix of the .bin/.idx pair; all else goes to stderr. A second call finds "
        "the first one's files.",
    )
    make.add_argument(
        "--cache-dir",
        type=Path,
        metavar="DIR",
        help=f"where prepared folders lie (default: ${cache.ENVIRONMENT_VARIABLE}, else "
        "dataset/cache in the checkout)",
    )
    make.set_defaults(run=_run_prepare)
    look = commands.add_parser(
        "inspect",
        help="show and check a .bin/.idx pair",
        description="Shows documents, tokens and the beginning of a document, and checks the "
        "files. Exit code 1 means damage was found.",
    )
    look.add_argument("prefix", type=Path, metavar="PREFIX", help="path without .bin and .idx")
    look.add_argument(
        "--document", type=int, default=0, metavar="N", help="which one to show, from 0"
    )
    look.set_defaults(run=_run_inspect)
    return parser


def _run_prepare(arguments: argparse.Namespace) -> int:
    started_s = time.monotonic()
    folder = cache.folder_to_use(arguments.cache_dir)
    done = prepare(EmbeddedSource(), Settings(), folder, _tell)
    facts = done.manifest
    origin = "built" if done.is_new else "from the cache"
    _tell(
        f"{facts.documents:,} documents, {facts.tokens:,} tokens, {facts.text_bytes:,} bytes of "
        f"text, vocabulary {facts.vocab_size:,}: {origin} in {time.monotonic() - started_s:.1f} s"
    )
    _say(str(done.prefix))
    return 0


def _run_inspect(arguments: argparse.Namespace) -> int:
    from dataset.inspection import (
        inspect_prefix,
    )  # numpy and tokenizers, which prepare may not need

    found = inspect_prefix(arguments.prefix.resolve(), arguments.document)
    _say(f"prefix      {arguments.prefix.resolve()}")
    _say(f"documents   {found.documents:,}")
    _say(f"tokens      {found.tokens:,}")
    if found.manifest:
        _say(f"vocabulary  {found.manifest.vocab_size:,}, end of document {found.manifest.eod}")
    else:
        _say("manifest    none for this prefix: checksums, ids and text were not checked")
    if found.sample is not None:
        _say(f"document {arguments.document} begins:\n{found.sample}")
    for problem in found.problems:
        _say(f"DAMAGED     {problem}")
    if found.problems:
        return FOUND_DAMAGE
    _say("checks      all passed")
    return 0


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")


def _tell(line: str) -> None:
    sys.stderr.write(line + "\n")


if __name__ == "__main__":
    sys.exit(main())
