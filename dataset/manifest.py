"""What a prepared folder says of itself, so that others can use it and damage can be seen."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from dataset.errors import DatasetError

NAME = "manifest.json"
SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Manifest:
    """Contents of ``manifest.json``; the trainer reads ``vocab_size`` and ``eod``."""

    schema_version: int
    key: str  # digest of the text, the settings and the versions that made this folder
    prefix: str  # name of the pair in this folder, without .bin and .idx
    documents: int
    tokens: int  # end-of-document tokens included
    text_bytes: int  # of the documents in UTF-8
    vocab_size: int  # entries of the tokenizer, end-of-document included
    eod: int  # id of the end-of-document token
    tokenizer: str  # name of its file in this folder
    settings: dict[str, Any]
    versions: dict[str, str]
    files: dict[str, dict[str, Any]]  # by name: sha256, bytes

    def write(self, folder: Path) -> None:
        """Write it into ``folder``; the same contents give the same bytes."""
        text = json.dumps(asdict(self), indent=2) + "\n"
        (folder / NAME).write_text(text, encoding="utf-8")

    def damage(self, folder: Path) -> str | None:
        """The first file of ``folder`` that is not what it was, in words; None when all are."""
        for name, facts in self.files.items():
            path = folder / name
            if not path.is_file():
                return f"{name} is missing"
            if file_facts(path) != facts:
                return f"the checksum of {name} does not match {NAME}"
        return None


def read(folder: Path) -> Manifest:
    """Read a folder's manifest.

    Raises:
        DatasetError: It is missing, is no JSON, or lacks a field.
    """
    path = folder / NAME
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DatasetError(f"no {path}") from error
    except ValueError as error:  # of JSON or of UTF-8
        raise DatasetError(f"{path} is not JSON: {error}") from error
    names = [field.name for field in fields(Manifest)]
    if not isinstance(values, dict) or set(values) != set(names):
        raise DatasetError(f"{path} does not have the fields {', '.join(names)}")
    if values["schema_version"] != SCHEMA_VERSION:
        raise DatasetError(
            f"{path}: schema_version = {values['schema_version']!r}, this reads {SCHEMA_VERSION}"
        )
    if not isinstance(values["files"], dict):
        raise DatasetError(f"{path}: field 'files' is not a table of file names")
    return Manifest(**values)


def file_facts(path: Path) -> dict[str, Any]:
    """Checksum and size of a file, as ``Manifest.files`` holds them."""
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return {"sha256": digest, "bytes": path.stat().st_size}
