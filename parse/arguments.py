"""Argument types that several commands share."""

from __future__ import annotations

import argparse
import math


def warmup_count(text: str) -> int:
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
