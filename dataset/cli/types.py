"""Kinds of values on the command line."""

from __future__ import annotations

import argparse
from pathlib import Path

MOST_MEGABYTES = 1 << 20


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
