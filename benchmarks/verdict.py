"""Whether a row trained what stock trained, from losses and fingerprints. Nothing imports torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Verdict:
    """What is the same as in stock's run.

    Attributes:
        equal: All bits that were compared; None when nothing could be.
        text: For a table.
    """

    equal: bool | None
    text: str


def compare(row: Mapping[str, Any] | None, stock: Mapping[str, Any] | None) -> Verdict:
    """Compare two results of the same iterations.

    Args:
        row: ``losses`` as exact text, and ``digests`` by part, None for a part that the process
            does not hold; None when the row failed.
        stock: The same of stock.
    """
    if row is None:
        return Verdict(None, "-")
    if stock is None:
        return Verdict(None, "no stock to compare")
    at = _first_difference(row["losses"], stock["losses"])
    parts = row["digests"].keys() | stock["digests"].keys()
    pairs = {part: (row["digests"].get(part), stock["digests"].get(part)) for part in parts}
    unseen = sorted(part for part, pair in pairs.items() if None in pair)
    differ = sorted(part for part, (a, b) in pairs.items() if part not in unseen and a != b)
    if at is not None:
        return Verdict(False, f"differs: losses from iteration {at}")
    if differ:
        return Verdict(False, f"differs: {', '.join(differ)}")
    return Verdict(True, f"equal, {', '.join(unseen)} not seen" if unseen else "equal")


def compare_rounds(
    rows: Sequence[Mapping[str, Any]], stocks: Sequence[Mapping[str, Any]]
) -> Verdict:
    """Compare every round of a row with stock's first: the worst verdict counts.

    Stock that differs from itself between rounds makes every comparison worthless, and says so.
    """
    if not rows or not stocks:
        return compare(rows[0] if rows else None, stocks[0] if stocks else None)
    if any(compare(again, stocks[0]).equal is False for again in stocks[1:]):
        return Verdict(None, "stock differs from itself")
    found = [compare(row, stocks[0]) for row in rows]
    return next((verdict for verdict in found if verdict.equal is False), found[0])


def _first_difference(losses: Sequence[str], others: Sequence[str]) -> int | None:
    """Iteration, from 1, from which two runs' losses differ; None if they do not."""
    for iteration, (loss, other) in enumerate(zip(losses, others, strict=False), start=1):
        if loss != other:
            return iteration
    return None if len(losses) == len(others) else min(len(losses), len(others)) + 1
