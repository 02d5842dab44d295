"""What every command shares: parser, kinds of values, results to stdout, all else to stderr."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

MOST_MEGABYTES = 1 << 20


def say(line: str) -> None:
    """Write a result."""
    sys.stdout.write(line + "\n")


def tell(line: str) -> None:
    """Write what is worth knowing and no result."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


class FlagParser(argparse.ArgumentParser):
    """Refuses unknown flags first: argparse would complain of the value behind one instead."""

    def parse_known_args(  # type: ignore[override]
        self,
        args: Sequence[str] | None = None,
        namespace: Any = None,  # noqa: ANN401
    ) -> tuple[Any, list[str]]:
        """Parse, as argparse does."""
        for word in args or ():
            if word == "--":
                break
            flag = word.partition("=")[0]
            if flag.startswith("--") and flag not in self._option_string_actions:
                self.error(f"unrecognized arguments: {word}{self._meant(flag)}")
        return super().parse_known_args(args, namespace)

    def _meant(self, flag: str) -> str:
        known = [name for name in self._option_string_actions if name.startswith("--")]
        begun = [name for name in known if name.startswith(flag)]
        near = begun or get_close_matches(flag, known, 1)
        return f"; did you mean {near[0]}?" if near else ""


class Commands:
    """The commands of a parser."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self._commands = parser.add_subparsers(
            dest="command", required=True, parser_class=FlagParser
        )

    def add(
        self,
        run: Callable[[argparse.Namespace], int],
        after_interrupt: str,
        about: tuple[str, str, str],
    ) -> argparse.ArgumentParser:
        """Add a command.

        Args:
            run: Does it; returns the exit code.
            after_interrupt: What is left behind when Ctrl-C stopped it.
            about: Its name, a few words on it, and its description.
        """
        name, words, description = about
        parser = self._commands.add_parser(
            name, help=words, description=description, allow_abbrev=False
        )
        parser.set_defaults(run=run, after_interrupt=after_interrupt)
        return parser


def positive(text: str) -> int:
    """A whole number from 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be at least 1")
    return number


def megabytes(text: str) -> int:
    """Mebibytes, as bytes."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < MOST_MEGABYTES:  # not a number is neither
        raise argparse.ArgumentTypeError(
            f"{text}: give a number of MiB from above 0 to below {MOST_MEGABYTES}"
        )
    return max(1, int(number * (1 << 20)))


def share(text: str) -> float:
    """A number over 0, up to 1."""
    number = float(text)
    if not 0 < number <= 1:
        raise argparse.ArgumentTypeError(f"{text}: must be over 0 and at most 1")
    return number


def prefix(text: str) -> Path:
    """A pair's path without ``.bin`` and ``.idx``, absolute."""
    return Path(text.removesuffix(".bin").removesuffix(".idx")).absolute()
