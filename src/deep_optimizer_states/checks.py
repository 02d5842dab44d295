"""Files and tables that users write or get: read, checked, and written whole or not at all."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Collection, Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import ValidationError


def explain(
    error: ValidationError, known: Collection[str], prefix: str = "", quote: str = "'"
) -> str:
    """Say what is wrong with a table, field by field.

    Args:
        error: Of pydantic.
        known: Names that a misspelt key is compared with.
        prefix: Stands before every key.
        quote: Stands around names; around those of wrong values only if it is a double quote, as in
            the JSON that the table comes from.
    """
    return "; ".join(_sentence(item, known, prefix, quote) for item in error.errors())


def did_you_mean(
    word: object, known: Iterable[object], cutoff: float = 0.3, quote: str = "'"
) -> str:
    """Return a question that names the known word nearest to ``word``; empty if none is near."""
    near = get_close_matches(str(word), [str(each) for each in known], n=1, cutoff=cutoff)
    return f"did you mean {quote}{near[0]}{quote}? " if near else ""


def _sentence(item: Any, known: Collection[str], prefix: str, quote: str) -> str:
    key = prefix + ".".join(str(part) for part in item["loc"])
    if item["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        hint = did_you_mean(item["loc"][-1], known, quote=quote)
        return f"unknown key {quote}{key}{quote}: {hint}known: {', '.join(known)}"
    if item["type"] == "missing":
        return f"{key} is missing"
    own = {"dataclass_type": "give a table", "string_pattern_mismatch": "give text"}
    message = own.get(item["type"], item["msg"].removeprefix("Value error, "))
    mark = quote if quote == '"' else ""
    where = f"{mark}{key.rstrip('.')}{mark}"
    return f"{where} = {item['input']!r}: {message}" if item["loc"] else f"{where}: {message}"


def read_toml(path: Path, wrong: type[Exception]) -> dict[str, Any]:
    """Read a TOML file; what cannot be read or is not valid raises ``wrong``, with a sentence."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise wrong(f"{path}: cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise wrong(f"{path}: not valid TOML: {error}") from None


def write_whole(path: Path, text: str, overwrite: bool = False) -> None:
    """Write a text file beside its place and move it there once it is complete.

    Raises:
        FileExistsError: ``path`` is there and may not be overwritten.
        OSError: The file cannot be written; names ``path``.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        try:
            beside.write_text(text, encoding="utf-8")
            if overwrite:
                beside.replace(path)
            else:
                os.link(beside, path)  # unlike a rename, it fails where a file is
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
