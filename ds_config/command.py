"""What the commands share: errors, words of the command line, files read and written."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MAX_BYTES = 4 << 20
"""A larger file is no configuration."""


class CommandError(ValueError):
    """A word, a file or a program of a command is wrong; one sentence says which and why."""


@dataclass
class Loaded:
    """A configuration as it was written."""

    source: str
    """Its path, or ``standard input``."""
    table: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    """What other readers of JSON would stumble over."""


def read_config(path: str) -> Loaded:
    """Read a configuration as guides print it, or standard input for ``-``.

    Raises:
        CommandError: it cannot be read, or is no object of JSON.
    """
    source = "standard input" if path == "-" else path
    try:
        data = sys.stdin.buffer.read(MAX_BYTES + 1) if path == "-" else _bytes(Path(path))
        text = data.decode("utf-8-sig")
    except OSError as error:
        raise CommandError(f"{source}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise CommandError(f"{source}: is no text in UTF-8 ({error})") from None
    if len(data) > MAX_BYTES:
        raise CommandError(f"{source}: is larger than {MAX_BYTES >> 20} MiB, no configuration")
    twice: list[str] = []
    notes = []

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        twice.extend(sorted({name for name in names if names.count(name) > 1}))
        return dict(pairs)

    try:
        table = json.loads(text, object_pairs_hook=once)
    except RecursionError:
        raise CommandError(f"{source}: is no JSON: too many blocks in each other") from None
    except json.JSONDecodeError as strict:
        twice.clear()
        try:
            import hjson  # comes with DeepSpeed, which reads its configuration with it

            table = hjson.loads(text, object_pairs_hook=once)
        except (ImportError, ValueError, RecursionError):
            raise CommandError(f"{source}: is no JSON: {strict}") from None
        if isinstance(table, dict):
            notes.append(
                f"is no strict JSON ({strict}): DeepSpeed reads it, Hugging Face's and other "
                "loaders do not; write it without"
            )
    if not isinstance(table, dict):
        raise CommandError(f"{source}: is {type(table).__name__}, a configuration is an object")
    notes += [f"'{name}' is given twice: DeepSpeed refuses the file" for name in twice]
    return Loaded(source, table, notes)


def _bytes(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(MAX_BYTES + 1)


def write_new(path: Path, text: str, option: str) -> None:
    """Write a file where none is yet.

    Raises:
        CommandError: there is one, or it cannot be written.
    """
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise CommandError(f"{option} {path}: is already there; give another name") from None
    except OSError as error:
        raise CommandError(f"{option} {path}: cannot be written: {error.strerror}") from None


def write_beside(path: Path, table: Mapping[str, Any]) -> Path:
    """Write a copy beside a file, under a name that nothing has yet.

    Raises:
        CommandError: the folder cannot be written.
    """
    number = 0
    while True:
        suffix = f"-{number}" if number else ""
        target = path.with_name(f"{path.stem}.fixed{suffix}.json")
        number += 1
        if not target.exists():
            write_new(target, json.dumps(table, indent=2) + "\n", "--fix")
            return target


def whole_number(text: str) -> int:
    """Return a number of 1 or more.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    if not text.isascii() or not text.isdigit() or not 0 < len(text) < 10 or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r}: give a whole number, 1 or more")
    return int(text)
