"""A block's ids on disk: one file of NumPy's, complete or not there.

It holds a record as JSON and, for each key, the lengths of its sequences, the sequences of each
document, and the ids. The format has checksums of its own.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataset.files import writing
from dataset.readers.blocks import Bad

ENDING = ".part"
UNFINISHED_ENDING = ".unfinished"
NAMES = ("lengths", "counts", "ids")
MOST_BAD_LISTED = 1000
# What the readers of zip files, arrays and JSON raise on damage: a flag may be flipped as well.
DAMAGE = (zipfile.BadZipFile, RuntimeError, ValueError, KeyError, TypeError, OSError, EOFError)


@dataclass(frozen=True)
class Facts:
    """What is known of a part."""

    number: int
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
    bad: list[Bad]
    """The first of them."""
    seconds: dict[str, float]


def write(folder: Path, facts: Facts, keys: Sequence[Sequence[NDArray[Any]]]) -> None:
    """Write a part; killed at any moment it leaves a whole one or none.

    Args:
        folder: The work folder.
        facts: What is known of it.
        keys: For each key its arrays, as in `NAMES`: (sequences,), (documents,), (tokens,).
    """
    record = np.frombuffer(json.dumps(asdict(facts)).encode(), np.uint8)
    arrays: dict[str, Any] = {
        f"{name}-{key}": array
        for key, some in enumerate(keys)
        for name, array in zip(NAMES, some, strict=True)
    }
    path = path_of(folder, facts.number)
    unfinished = path.with_suffix(UNFINISHED_ENDING)
    with writing(path), unfinished.open("wb") as file:
        np.savez(file, record=record, **arrays)
    unfinished.replace(path)


def path_of(folder: Path, number: int) -> Path:
    """Where a part lies."""
    return folder / f"{number:08}{ENDING}"


def read(path: Path, name: str, key: int) -> NDArray[Any]:
    """One of a part's arrays."""
    with np.load(path) as arrays:
        found: NDArray[Any] = arrays[f"{name}-{key}"]
    return found


def finished(folder: Path) -> dict[int, Facts]:
    """The whole parts of a work folder, by number; what is damaged is as good as not there."""
    found = {}
    for path in sorted(folder.glob(f"*{ENDING}")):
        try:
            with zipfile.ZipFile(path) as file:
                is_whole = file.testzip() is None
                num_arrays = len(file.namelist())
            with np.load(path) as arrays:
                values = json.loads(arrays["record"].tobytes())
            facts = Facts(**values | {"bad": [tuple(one) for one in values["bad"]]})
        except DAMAGE:
            continue
        # Damage to the directory can hide an array, which no checksum tells.
        is_whole = is_whole and num_arrays == 1 + len(NAMES) * len(facts.text_bytes)
        if is_whole and path == path_of(folder, facts.number):
            found[facts.number] = facts
    return found
