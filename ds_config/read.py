"""Reads a configuration as guides print it: with comments, trailing commas, keys given twice."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hjson

MAX_BYTES = 4 << 20
"""A larger file is no configuration."""


_COMMENT = r"(?>//[^\n]*|#[^\n]*|/\*.*?\*/)"
_ODD = re.compile(
    rf'"(?:\\.|[^"\\\n])*"|(?P<comments>{_COMMENT})|(?P<commas>,)(?=(?:\s|{_COMMENT})*[}}\]])',
    re.DOTALL,
)
"""What guides print and strict JSON does not have; texts in quotes match first, and are skipped."""
_SHOWN = 5


class NotAConfigError(ValueError):
    """The file is no configuration of DeepSpeed; the message says why."""


@dataclass
class Loaded:
    """A configuration as it was written."""

    source: str
    """Its path, or ``standard input``."""
    table: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    """What other readers of JSON would stumble over."""


def read_config(path: str) -> Loaded:
    """Read a file, or standard input for ``-``.

    Raises:
        NotAConfigError: it cannot be read, or is no object of JSON.
    """
    source = "standard input" if path == "-" else path
    try:
        data = sys.stdin.buffer.read(MAX_BYTES + 1) if path == "-" else _bytes(Path(path))
        text = data.decode("utf-8-sig")
    except OSError as error:
        raise NotAConfigError(f"{source}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise NotAConfigError(f"{source}: is no text in UTF-8 ({error})") from None
    if len(data) > MAX_BYTES:
        raise NotAConfigError(f"{source}: is larger than {MAX_BYTES >> 20} MiB, no configuration")
    twice: list[str] = []
    notes = []

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        twice.extend(sorted({name for name in names if names.count(name) > 1}))
        return dict(pairs)

    try:
        table = json.loads(text, object_pairs_hook=once)
    except (json.JSONDecodeError, RecursionError) as strict:
        twice.clear()
        try:
            table = hjson.loads(text, object_pairs_hook=once)
        except (hjson.HjsonDecodeError, RecursionError):
            raise NotAConfigError(f"{source}: is no JSON: {strict}") from None
        if isinstance(table, dict):
            notes.append(
                f"is no strict JSON ({_odd(text) or strict}): DeepSpeed reads it, Hugging Face's "
                "and other loaders do not; write it without"
            )
    if not isinstance(table, dict):
        raise NotAConfigError(f"{source}: is {type(table).__name__}, a configuration is an object")
    notes += [f"'{name}' is given twice: DeepSpeed refuses the file" for name in twice]
    return Loaded(source, table, notes)


def _odd(text: str) -> str:
    """Comments and trailing commas with their lines; empty where there are none."""
    lines: dict[str, list[int]] = {}
    for found in _ODD.finditer(text):
        if found.lastgroup:
            line = text.count("\n", 0, found.start()) + 1
            lines.setdefault(found.lastgroup, []).append(line)
    words = {"comments": "comments", "commas": "trailing commas"}
    return " and ".join(
        f"{words[kind]} in line {', '.join(map(str, at[:_SHOWN]))}"
        + (", ..." if len(at) > _SHOWN else "")
        for kind, at in lines.items()
    )


def _bytes(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(MAX_BYTES + 1)
