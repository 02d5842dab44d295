"""Writes a corrected copy of a configuration beside it: what can be mended without guessing."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ds_config.explain import Explanation, Note

_ZERO = "zero_optimization"


def fixed(table: Mapping[str, Any], found: Explanation) -> tuple[dict[str, Any], list[str]]:
    """A corrected copy, and what was changed; an unknown key that has no better place is left out.

    Values of the user's own are changed only where DeepSpeed refuses their type.
    """
    result = copy.deepcopy(dict(table))
    changes = []
    for note in (*found.unknown, *found.faults):
        block, name = _place(result, note.key)
        if note.mend[0] and block is not None and name in block:
            changes.append(f"{note.key}: {_mended(result, block, name, note)}")
    _older_names(result, changes)
    return result, changes


def _mended(result: dict[str, Any], block: dict[str, Any], name: str, note: Note) -> str:
    """Mend one key; says what was done."""
    kind, target = note.mend
    value = block.pop(name)
    if kind == "number":
        block[name] = _number(value)
        return f"{value!r} as a number"
    place, word = (block, target) if kind == "rename" else (_make(result, target), name)
    if kind == "drop" or word in place:
        return "left out"
    place[word] = value
    return f"now {word}" if kind == "rename" else f"moved to {target or 'the top level'}"


def write_beside(path: Path, table: Mapping[str, Any]) -> Path:
    """Write a copy beside a file, under a name that nothing has yet.

    Raises:
        OSError: the folder cannot be written.
    """
    number = 0
    while True:
        suffix = f"-{number}" if number else ""
        target = path.with_name(f"{path.stem}.fixed{suffix}.json")
        try:
            with target.open("x", encoding="utf-8") as file:
                json.dump(table, file, indent=2)
                file.write("\n")
        except FileExistsError:
            number += 1
        else:
            return target


def _older_names(table: dict[str, Any], changes: list[str]) -> None:
    zero = table.get(_ZERO)
    if not isinstance(zero, dict):
        return
    for old, new in (("cpu_offload", "offload_optimizer"), ("cpu_offload_param", "offload_param")):
        if old in zero and new not in zero:
            if zero.pop(old):
                zero[new] = {"device": "cpu"}
            changes.append(f"{_ZERO}.{old}: now {new}")
    old = "stage3_gather_fp16_weights_on_model_save"
    if old in zero:
        zero.setdefault("stage3_gather_16bit_weights_on_model_save", zero.pop(old))
        changes.append(f"{_ZERO}.{old}: now stage3_gather_16bit_weights_on_model_save")


def _place(table: dict[str, Any], key: str) -> tuple[dict[str, Any] | None, str]:
    *blocks, name = key.split(".")
    at: Any = table
    for block in blocks:
        at = at.get(block) if isinstance(at, dict) else None
    return (at if isinstance(at, dict) else None), name


def _make(table: dict[str, Any], key: str) -> dict[str, Any]:
    at = table
    for block in filter(None, key.split(".")):
        inner = at.setdefault(block, {})
        if not isinstance(inner, dict):
            return table
        at = inner
    return at


def _number(text: str) -> float:
    value = float(text)
    return int(value) if value == int(value) else value
