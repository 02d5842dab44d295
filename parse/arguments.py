"""Argument types that several commands share."""

from __future__ import annotations

import argparse
import math


def add_warmup(
    parser: argparse.ArgumentParser, what: str = "first iterations left out (1)"
) -> None:
    """The option ``--warmup``."""
    parser.add_argument("--warmup", type=_count, default=1, help=what)


def _count(text: str) -> int:
    """A whole number, 0 or more.

    Raises:
        argparse.ArgumentTypeError: ``text`` is something else.
    """
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        raise argparse.ArgumentTypeError(f"'{text}': give a whole number, 0 or more")
    return int(text)


def number_from_0(text: str) -> float:
    """A number, 0 or more.

    Raises:
        argparse.ArgumentTypeError: ``text`` is something else.
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"'{text}': give a number, 0 or more")
    return value
