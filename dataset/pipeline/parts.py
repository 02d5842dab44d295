"""A finished part on disk: one file of NumPy's, complete or not there.

It holds a record as JSON and, for each key, the lengths of its sequences, the sequences of each
document, and the ids. The format has checksums of its own.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataset.readers.blocks import Position
from dataset.readers.parse import Place

ENDING = ".part"
UNFINISHED_ENDING = ".unfinished"
NAMES = ("lengths", "counts", "ids")
MOST_BAD_LISTED = 1000
# What the readers of zip files, arrays and JSON raise on damage: a flag may be flipped as well.
DAMAGE = (zipfile.BadZipFile, RuntimeError, ValueError, KeyError, TypeError, OSError, EOFError)


@dataclass(frozen=True)
class Encoded:
    """Documents of one key."""

    lengths: NDArray[np.int32]  # (sequences,) as the index shall have them
    counts: NDArray[np.int32]  # (documents,) sequences of each
    ids: NDArray[Any]  # (tokens,) of the pair's id type


@dataclass(frozen=True)
class Facts:
    """What is known of a part."""

    number: int
    end: Position
    consumed_bytes: int
    """Of the input files on disk, up to the end of this part."""
    text_bytes: list[int]
    """Of the documents in UTF-8, by key."""
    tokens: int
    """Of all keys."""
    empty: int
    """Records without text, left out."""
    num_bad: int
    """Records that cannot be used."""
    bad: list[tuple[int, int, str]]
    """The first of them: number of the file, line, reason."""
    seconds: dict[str, float]


def write(folder: Path, facts: Facts, keys: list[Encoded]) -> None:
    """Write a part; killed at any moment it leaves a whole one or none.

    Args:
        folder: The work folder.
        facts: What is known of it.
        keys: Documents of each key, in the keys' order.
    """
    record = np.frombuffer(json.dumps(asdict(facts)).encode(), np.uint8)
    arrays = {
        f"{name}-{key}": getattr(encoded, name)
        for key, encoded in enumerate(keys)
        for name in NAMES
    }
    path = path_of(folder, facts.number)
    unfinished = path.with_suffix(UNFINISHED_ENDING)
    with unfinished.open("wb") as file:
        np.savez(file, record=record, **arrays)
    unfinished.replace(path)


def path_of(folder: Path, number: int) -> Path:
    """Where a part lies."""
    return folder / f"{number:08}{ENDING}"


@dataclass(frozen=True)
class Part:
    """One key of a part on disk; nothing of it stays in memory."""

    path: Path
    key: int

    def sequence_lengths(self) -> NDArray[np.int32]:
        """Tokens of each sequence."""
        return self._array("lengths")

    def sequences_per_document(self) -> NDArray[np.int32]:
        """How many sequences each document has."""
        return self._array("counts")

    def ids(self) -> NDArray[Any]:
        """The ids, (tokens,)."""
        return self._array("ids")

    def _array(self, name: str) -> NDArray[Any]:
        with np.load(self.path) as arrays:
            found: NDArray[Any] = arrays[f"{name}-{self.key}"]
        return found


def finished(folder: Path) -> Iterator[Facts]:
    """The whole parts of a work folder, by number; what is damaged is as good as not there."""
    for path in sorted(folder.glob(f"*{ENDING}")):
        try:
            with zipfile.ZipFile(path) as file:
                is_whole = file.testzip() is None
                num_arrays = len(file.namelist())
            facts = _read_facts(path)
        except DAMAGE:
            continue
        # Damage to the directory can hide an array, which no checksum tells.
        is_whole = is_whole and num_arrays == 1 + len(NAMES) * len(facts.text_bytes)
        if is_whole and path == path_of(folder, facts.number):
            yield facts


def _read_facts(path: Path) -> Facts:
    with np.load(path) as arrays:
        values = json.loads(arrays["record"].tobytes())
    end = values.pop("end")
    values["bad"] = [tuple(one) for one in values["bad"]]
    return Facts(end=Position(end["file"], Place(**end["place"])), **values)
