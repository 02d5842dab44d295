"""Writes a corrected copy of a configuration, and says of each change what it was."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import Any

from ds_config.explain import explain
from ds_config.installed import Key
from ds_config.release import Answer, Mend


def fixed(
    table: Mapping[str, Any], answer: Answer, framework: str = ""
) -> tuple[dict[str, Any], list[str]]:
    """Return a corrected copy, and what was changed, until nothing is left that can be mended.

    An unknown key that has no better place is left out. Values of the user's own are changed only
    where they have another type or form than the key, to the value that they spell. What is left
    out is in the line that says so.

    Args:
        table: As read.
        answer: What the installed DeepSpeed says.
        framework: As for :func:`~ds_config.explain.explain`.
    """
    result = copy.deepcopy(dict(table))
    changes: list[str] = []
    while True:
        found = explain(result, answer, framework=framework)
        notes = (*found.unknown, *found.faults, *found.warnings)
        mends = [note.mend for note in notes if note.mend]
        done = [line for mend in mends if (line := _mended(result, mend))]
        changes += done
        if not done:
            return result, changes


def _mended(result: dict[str, Any], mend: Mend) -> str:
    """Mend one key, and return what was done; nothing where it is gone."""
    *blocks, name = mend.at
    block = _block(result, tuple(blocks))
    if block is None or name not in block:
        return ""
    value, key = block[name], ".".join(mend.at)
    if mend.kind == "replace":
        block[name] = mend.value
        return f"{key}: {_text(value)} written as {_text(mend.value)}"
    del block[name]
    why = _put(result, mend.to, value) if mend.kind == "move" else ""
    if mend.kind == "drop" or why:
        return f"{key}: left out{why}; it was {_text(value)}"
    *around, new = mend.to
    if around == blocks:
        return f"{key}: now {new}"
    return f"{key}: moved to {'.'.join(around) or 'the top level'}"


def _put(result: dict[str, Any], key: Key, value: Any) -> str:
    """Put a value under a key that is free, or return why that cannot be done."""
    target = _block(result, key[:-1], is_made=True)
    if target is None:
        return f", since {'.'.join(key[:-1])} is no block"
    if key[-1] in target:
        return f", since {'.'.join(key)} is given too"
    target[key[-1]] = value
    return ""


def _block(table: dict[str, Any], at: Key, is_made: bool = False) -> dict[str, Any] | None:
    """Return a block of a configuration, made where it is missing; None where a value is there."""
    block: Any = table
    for name in at:
        if isinstance(block, dict) and name not in block and is_made:
            block[name] = {}
        block = block.get(name) if isinstance(block, dict) else None
    return block if isinstance(block, dict) else None


def _text(value: Any) -> str:
    return json.dumps(value, default=str)
