"""Arguments to commands, errors to exit codes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from dataset.cli import (
    clean_command,
    find_command,
    inspect_command,
    merge_command,
    prepare_command,
)
from dataset.cli.output import tell
from dataset.cli.parser import FlagParser
from dataset.errors import DatasetError

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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m dataset", description="Text to tokens.", allow_abbrev=False
    )
    commands = parser.add_subparsers(dest="command", required=True, parser_class=FlagParser)
    for module in (prepare_command, find_command, inspect_command, merge_command, clean_command):
        module.add(commands)
    return parser
