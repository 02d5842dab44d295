"""Arguments to commands, errors to exit codes."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from dataset.cli import clean, crawl, pairs, prepare
from dataset.cli.common import FlagParser, tell
from dataset.errors import DatasetError

WRONG_USE = 2
INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        0; 1 when `inspect` found damage or `find` nothing; 2 when something the user can mend is
        wrong; 130 after Ctrl-C.
    """
    import sys

    parser = argparse.ArgumentParser(
        prog="python -m dataset", description="Text to tokens.", allow_abbrev=False
    )
    commands = parser.add_subparsers(dest="command", required=True, parser_class=FlagParser)
    for module in (prepare, pairs, crawl, clean):
        module.add(commands)
    arguments = parser.parse_args(argv)
    try:
        code: int = arguments.run(arguments)
    except BrokenPipeError:
        sys.stderr.close()  # whoever read the output has gone
        return WRONG_USE
    except (DatasetError, OSError) as error:
        tell(f"dataset {arguments.command}: {error}")
        return WRONG_USE
    except KeyboardInterrupt:
        tell(f"dataset {arguments.command}: interrupted; {arguments.after_interrupt}")
        return INTERRUPTED
    return code
