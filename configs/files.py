"""Small things that every room needs: files that survive a crash, JSON, text for a terminal."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from configs.errors import ConfigError

ROOT = Path(__file__).resolve().parents[1]
"""The checkout: ranks and tools run from here."""


def write_json(path: Path, value: object) -> None:
    """Write a value as JSON with :func:`write_text`."""
    write_text(path, as_json(value))


def as_json(value: object) -> str:
    """Return a value as the harness's files hold it."""
    return json.dumps(value, indent=2, allow_nan=False) + "\n"


def write_text(path: Path, text: str) -> None:
    """Write a file so that a reader finds the old one or the new one, never a part of it."""
    # What only reads files, quick-parse-results.py above all, needs no package.
    from deep_optimizer_states.toml_io import write_whole

    write_whole(path, text, overwrite=True)


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a file; empty where there is none that can be read."""
    try:
        value = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def read_given_json(path: Path) -> dict[str, Any]:
    """Return the object in a file that has to be there.

    Raises:
        ConfigError: it cannot be read, or holds no JSON object.
    """
    value = _parsed(path, json.loads, "JSON")
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: not a JSON object")
    return value


def read_toml(path: Path) -> dict[str, Any]:
    """Return the table in a TOML file.

    Raises:
        ConfigError: the file cannot be read or is not TOML; the line is named.
    """
    table: dict[str, Any] = _parsed(path, tomllib.loads, "TOML")
    return table


def _parsed(path: Path, parse: Callable[[str], Any], kind: str) -> Any:
    try:
        return parse(path.read_text(encoding="utf-8-sig"))  # editors may begin it with a mark
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{path}: not valid {kind}: {error}") from None


def last_lines(path: Path, count: int = 20, read_bytes: int = 65_536) -> list[str]:
    """Return the last ``count`` lines of a log, of its last ``read_bytes``; [] without a file."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - read_bytes))
            text = file.read().decode("utf-8", errors="replace")
    except FileNotFoundError:
        return []
    return [line.rstrip() for line in text.splitlines() if line.strip()][-count:]


def json_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a JSON-lines file; a line that a crash cut off is left out."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return []
    objects = []
    for line in text.splitlines():
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            objects.append(value)
    return objects


def printable(text: str, kept: str = "") -> str:
    """Return foreign text as one line that no terminal takes for commands.

    Args:
        text: Often a path or a name, which can hold anything.
        kept: Characters to leave as they are, such as a newline.
    """
    return "".join(c if c.isprintable() or c in kept else "?" for c in text)
