"""Reads a configuration as guides print it: with comments, trailing commas, keys given twice."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MAX_BYTES = 4 << 20
"""A larger file is no configuration."""


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
    except RecursionError:
        raise NotAConfigError(f"{source}: is no JSON: too many blocks in each other") from None
    except json.JSONDecodeError as strict:
        twice.clear()
        try:
            import hjson  # comes with DeepSpeed, which reads its configuration with it

            table = hjson.loads(text, object_pairs_hook=once)
        except (ImportError, ValueError, RecursionError):
            raise NotAConfigError(f"{source}: is no JSON: {strict}") from None
        if isinstance(table, dict):
            notes.append(
                f"is no strict JSON from line {strict.lineno} on, for a comment or a trailing "
                "comma: DeepSpeed reads it, Hugging Face's and other loaders do not; write it "
                "without"
            )
    if not isinstance(table, dict):
        raise NotAConfigError(f"{source}: is {type(table).__name__}, a configuration is an object")
    notes += [f"'{name}' is given twice: DeepSpeed refuses the file" for name in twice]
    return Loaded(source, table, notes)


def _bytes(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(MAX_BYTES + 1)
