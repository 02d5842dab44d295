"""The file beside a pair: counts, vocabulary, settings and checksums, so that damage is seen."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from configs.errors import ConfigError
from configs.files import read_given_json, write_json
from configs.table import Table
from dataset.files import DatasetError, file_digest, writing

NAME = "manifest.json"


class Manifest(Table):
    """Contents of a manifest; the trainer reads ``vocab_size`` and ``eod``.

    The default corpus has one ``manifest.json`` in its folder. A pair of the user's own text has
    ``PREFIX.manifest.json``, and the first of a folder is copied to ``manifest.json`` as well.
    """

    schema_version: Literal[1] = 1
    key: str  # digest of the text, the settings and the versions that made this pair
    prefix: str  # name of the pair in this folder, without .bin and .idx
    documents: int
    tokens: int  # end-of-document tokens included
    text_bytes: int  # of the documents in UTF-8
    vocab_size: int  # entries of the tokenizer, end-of-document included
    eod: int  # id of the end-of-document token, -1 when the vocabulary has none
    tokenizer: str  # name of its file in this folder
    settings: dict[str, Any]
    versions: dict[str, str]
    files: dict[str, dict[str, Any]]  # by name: sha256, bytes
    # Of which input files more than a few records were no documents, a sentence each.
    damaged_input: tuple[str, ...] = ()

    def write(self, path: Path) -> None:
        """Write it in one step; the same contents give the same bytes."""
        with writing(path):
            write_json(path, self.model_dump())

    def publish(self, prefix: Path) -> None:
        """Write it for a pair of the user's own text, and for the trainer if it is the first."""
        for_trainer = prefix.parent / NAME
        if not for_trainer.exists():
            self.write(for_trainer)
        self.write(path_of(prefix))

    def damage(self, folder: Path) -> str | None:
        """Return the first file that is not what it was, in words; None when all are."""
        for name, facts in self.files.items():
            path = folder / name
            if not path.is_file():
                return f"{name} is missing"
            if file_facts(path) != facts:
                return f"the checksum of {name} does not match its manifest"
        return None


def path_of(prefix: Path) -> Path:
    """Return where the manifest of a pair of the user's own text lies."""
    return prefix.with_name(f"{prefix.name}.{NAME}")


def raw(prefix: Path) -> dict[str, Any]:
    """Return what a manifest says of a pair, in whatever fields; {} when none is about it.

    Raises:
        DatasetError: There is a manifest that cannot be read.
    """
    for path in (path_of(prefix), prefix.parent / NAME):
        if path.exists():
            found = _table(path)
            if found.get("prefix") == prefix.name:
                return found
    return {}


def find(prefix: Path) -> Manifest | None:
    """Return the manifest of a pair: its own, or its folder's when that is about it.

    Raises:
        ConfigError: There is one, and it cannot be read.
    """
    found = raw(prefix)
    return Manifest.read(found, str(path_of(prefix))) if found else None


def read(path: Path) -> Manifest:
    """Read a manifest.

    Raises:
        ConfigError: It is missing, is no JSON, or a field is wrong.
    """
    return Manifest.read(_table(path), str(path))


def _table(path: Path) -> dict[str, Any]:
    try:
        return read_given_json(path)
    except ConfigError as error:
        raise DatasetError(
            f"{error}; get it again, or move it away if it is of other data"
        ) from error


def require_one_vocabulary(folder: Path, vocab_size: int, eod: int) -> None:
    """Check that data of this vocabulary may join what is in a folder: the trainer reads one.

    Raises:
        DatasetError: The folder's data is of another.
    """
    path = folder / NAME
    if not path.exists():
        return
    try:
        found = read(path)
    except ConfigError as error:
        raise DatasetError(f"{error}: give the output a folder of its own") from error
    if (found.vocab_size, found.eod) != (vocab_size, eod):
        raise DatasetError(
            f"{folder} has data of another vocabulary ({found.vocab_size} entries, end of document "
            f"{found.eod}; not {vocab_size} and {eod}): give the output a folder of its own"
        )


def file_facts(path: Path) -> dict[str, Any]:
    """Return checksum and size of a file, as ``Manifest.files`` holds them."""
    return {"sha256": file_digest(path), "bytes": path.stat().st_size}
