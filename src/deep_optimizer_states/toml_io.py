"""Files and tables that users write or get: read, checked, and written whole or not at all."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import ValidationError


@dataclass(frozen=True)
class Words:
    """How errors of a file call its keys."""

    kind: str = "key"
    """What a key is called: ``unknown key 'x'``."""
    prefix: str = ""
    """Stands before every key."""
    quote: str = "'"
    """Stands around names of keys that are unknown."""
    field: str = "{}"
    """A key that is missing or has a wrong value: ``{}`` stands for its name."""


def explain(error: ValidationError, known: Collection[str], words: Words = Words()) -> str:
    """Say what is wrong with a table, key by key.

    Args:
        error: Of pydantic.
        known: Names that a misspelt key is compared with.
        words: What keys are called.
    """
    return "; ".join(_sentence(item, known, words) for item in error.errors())


def did_you_mean(
    word: object, known: Iterable[object], cutoff: float = 0.3, quote: str = "'"
) -> str:
    """Return a question that names the known word nearest to ``word``; empty if none is near."""
    near = get_close_matches(str(word), [str(each) for each in known], n=1, cutoff=cutoff)
    return f"did you mean {quote}{near[0]}{quote}? " if near else ""


def _sentence(item: Any, known: Collection[str], words: Words) -> str:
    key = words.prefix + ".".join(str(part) for part in item["loc"])
    if item["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        unknown = f"unknown {words.kind} {words.quote}{key}{words.quote}"
        hint = did_you_mean(item["loc"][-1], known, cutoff=0.6, quote=words.quote)
        # Names of the whole table are no list of what a part of it may have.
        names = f"known: {', '.join(known)}" if len(item["loc"]) == 1 else ""
        return f"{unknown}: {hint}{names}".rstrip(": ")
    name = words.field.format(key.rstrip("."))
    if item["type"] == "missing":
        return f"{name} is missing"
    is_no_table = item["type"] == "dataclass_type"
    message = "give a table" if is_no_table else item["msg"].removeprefix("Value error, ")
    if not key:
        return message
    is_too_long = isinstance(item["input"], dict)
    return f"{name}: {message}" if is_too_long else f"{name} = {item['input']!r}: {message}"


def read_toml(path: Path, wrong: type[Exception]) -> dict[str, Any]:
    """Read a TOML file; what cannot be read or is not valid raises ``wrong``, with a sentence."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))  # editors may begin it so
    except OSError as error:
        raise wrong(f"{path}: cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise wrong(f"{path}: not valid TOML: {error}") from None


def write_whole(path: Path, text: str, overwrite: bool = False) -> None:
    """Write a text file beside its place and move it there once it is complete and on the disk.

    Raises:
        FileExistsError: ``path`` is there and may not be overwritten.
        OSError: The file cannot be written; names ``path``.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        try:
            with beside.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            if overwrite:
                beside.replace(path)
            else:
                os.link(beside, path)  # unlike a rename, it fails where a file is
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
