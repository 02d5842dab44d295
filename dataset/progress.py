"""A progress bar on a terminal, nothing anywhere else."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

Item = TypeVar("Item")


def track(items: Iterable[Item], label: str, total: int | None = None) -> Iterable[Item]:
    """Show how far an iteration is, on stderr; captured logs stay free of bars.

    Args:
        items: What is iterated over.
        label: A word for what is being done.
        total: How many items come, if known.
    """
    from tqdm import tqdm  # type: ignore[import-untyped]  # not needed when the cache is valid

    # disable=None: tqdm draws only where stderr is a terminal.
    bar: Iterable[Item] = tqdm(items, desc=label, total=total, disable=None, leave=False)
    return bar
