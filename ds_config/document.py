"""A configuration as a file: read as guides print it, and written where none is yet."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from configs.errors import ConfigError


@dataclass
class Document:
    """A configuration as it was written."""

    source: str
    """Its path."""
    table: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    """Oddities over which other readers of JSON would stumble."""


def read_config(path: Path) -> Document:
    """Read a configuration, comments and trailing commas too.

    Raises:
        ConfigError: it cannot be read, or is no object of JSON.
    """
    source = str(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{source}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{source}: is no text in UTF-8 ({error})") from None
    twice: list[str] = []
    notes = []

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        twice.extend(sorted({name for name in names if names.count(name) > 1}))
        return dict(pairs)

    try:
        table = json.loads(text, object_pairs_hook=once)
    except RecursionError:
        raise ConfigError(f"{source}: is no JSON: too many blocks in each other") from None
    except json.JSONDecodeError as strict:
        twice.clear()
        try:
            import hjson  # comes with DeepSpeed, which reads its configuration with it

            table = hjson.loads(text, object_pairs_hook=once)
        except (ImportError, ValueError, RecursionError):
            raise ConfigError(f"{source}: is no JSON: {strict}") from None
        notes.append(
            f"is no strict JSON ({strict}): DeepSpeed reads it, Hugging Face's and other loaders "
            "do not; write it without"
        )
    if not isinstance(table, dict):
        raise ConfigError(f"{source}: is {type(table).__name__}, a configuration is an object")
    notes += [f"'{name}' is given twice: DeepSpeed refuses the file" for name in twice]
    return Document(source, table, notes)


def write_new(path: Path, text: str, option: str) -> None:
    """Write a file where none is yet.

    Raises:
        ConfigError: there is one, or it cannot be written.
    """
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(f"{option} {path}: is already there; give another name") from None
    except OSError as error:
        raise ConfigError(f"{option} {path}: cannot be written: {error.strerror}") from None
