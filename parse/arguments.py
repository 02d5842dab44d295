"""Argument types that several commands share."""

from __future__ import annotations

import argparse


def warmup_count(text: str) -> int:
    """A whole number, 0 or more.

    Raises:
        argparse.ArgumentTypeError: ``text`` is something else.
    """
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        raise argparse.ArgumentTypeError(f"'{text}': give a whole number, 0 or more")
    return int(text)
