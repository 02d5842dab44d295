"""Results to stdout, all else to stderr."""

from __future__ import annotations

import sys


def say(line: str) -> None:
    """Write a result."""
    sys.stdout.write(line + "\n")


def tell(line: str) -> None:
    """Write what is worth knowing and no result."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
