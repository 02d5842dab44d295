"""Kinds of values on the command line."""

from __future__ import annotations

import argparse
from pathlib import Path


def positive(text: str) -> int:
    """A whole number from 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be at least 1")
    return number


def megabytes(text: str) -> int:
    """Mebibytes, as bytes."""
    number = float(text)
    if not 0 < number < 1 << 20:
        raise argparse.ArgumentTypeError(f"{text}: must be more than 0")
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
