"""``python -m dataset merge PREFIX PREFIX ... --output-prefix P``."""

from __future__ import annotations

import argparse
from typing import Any

from dataset.cli.output import say, tell
from dataset.cli.types import prefix
from dataset.errors import DatasetError


def add(commands: Any) -> None:  # noqa: ANN401 - argparse's class for it is private
    """Add the command to a parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "merge",
        help="join .bin/.idx pairs",
        description="Writes one pair with the documents of all, in the order given, and prints its "
        "prefix. The pairs stay.",
        allow_abbrev=False,
    )
    parser.set_defaults(run=run, after_interrupt="nothing was written")
    parser.add_argument("prefixes", nargs="+", type=prefix, metavar="PREFIX", help="two or more")
    parser.add_argument("--output-prefix", type=prefix, required=True, metavar="P")


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    from dataset.merging import merge

    if len(arguments.prefixes) < 2:
        raise DatasetError("give two prefixes or more")
    counts = merge(arguments.prefixes, arguments.output_prefix)
    tell(f"{counts.documents:,} documents, {counts.tokens:,} tokens")
    say(str(arguments.output_prefix))
    return 0
