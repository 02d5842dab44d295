"""``python -m dataset find NAME``: the prefix of prepared data, for other programs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from dataset import manifest
from dataset.cli.output import say
from dataset.cli.prepare_arguments import OSCAR
from dataset.default import cache

EMBEDDED = "embedded"
NOT_PREPARED = 1


def add(commands: Any) -> None:  # noqa: ANN401 - argparse's class for it is private
    """Add the command to a parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "find",
        help="print the prefix of prepared data",
        description="Prints the prefix of the data, or nothing and exit code 1 when `prepare` has "
        "not made it; nothing is fetched or built.",
        allow_abbrev=False,
    )
    parser.set_defaults(run=run, after_interrupt="nothing was changed")
    parser.add_argument("name", choices=[EMBEDDED, OSCAR])
    parser.add_argument("--cache-dir", type=Path, metavar="DIR", help="as for prepare")


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    folder = cache.folder_to_use(arguments.cache_dir)
    if arguments.name == OSCAR:
        prefix = folder / OSCAR / f"{OSCAR}_text_document"
        # The manifest is written last: where it is, the pair is whole.
        found = manifest.path_of(prefix).is_file()
    else:
        from dataset.default.build import Settings, place
        from dataset.default.embedded import EmbeddedSource

        prefix, key = place(EmbeddedSource(), Settings(), folder)
        found = cache.look_up(prefix.parent, key)[0] is not None
    if not found:
        return NOT_PREPARED
    say(str(prefix))
    return 0
