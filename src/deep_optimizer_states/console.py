"""Lines for a person, folded where a terminal shows them."""

from __future__ import annotations

import sys
import textwrap

COLUMNS = 100
"""Width of a terminal that every line for the user fits into."""


def say(text: str) -> None:
    """Print lines for the user, at once; a terminal gets them folded at blanks.

    A path or a command stays whole, and in a file a line stays a line, so that both can be found.
    """
    if sys.stdout.isatty():
        text = "\n".join(map(_folded, text.split("\n")))
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _folded(line: str) -> str:
    if len(line) <= COLUMNS:
        return line
    indent = line[: len(line) - len(line.lstrip())]
    return textwrap.fill(
        line, COLUMNS, subsequent_indent=f"{indent}    ", break_long_words=False,
        break_on_hyphens=False, replace_whitespace=False, drop_whitespace=True,
    )  # fmt: skip
