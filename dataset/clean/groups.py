"""Texts that are alike: which one stays and which go, as a file that people read and change."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from dataset.errors import DatasetError
from dataset.outputs import written

Group = tuple[str, list[tuple[str, float]]]
"""Name of the text that stays; names of those that go, and their similarity to it."""


def write(path: Path, groups: Iterable[Group]) -> None:
    """Write one group a line.

    Raises:
        DatasetError: There is no room for it.
    """
    with written(path) as file:
        for kept, alike in groups:
            members = [{"id": name, "similarity": round(share, 4)} for name, share in alike]
            line = json.dumps({"kept": kept, "duplicates": members}, ensure_ascii=False)
            # A name may hold half of a surrogate pair: it came out of a record's other fields.
            file.write(line.encode(errors="backslashreplace") + b"\n")


def to_remove(paths: Iterable[Path]) -> frozenset[str]:
    """The names of the texts that go.

    Raises:
        DatasetError: A file cannot be used, or a name stays and goes in it.
    """
    gone: set[str] = set()
    for path in paths:
        kept: set[str] = set()
        here: set[str] = set()
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, ValueError) as error:
            raise DatasetError(f"--remove-groups {path}: cannot be read: {error}") from error
        for number, line in enumerate(lines, 1):
            try:
                group = json.loads(line)
                kept.add(group["kept"])
                here.update(member["id"] for member in group["duplicates"])
            except (ValueError, KeyError, TypeError) as error:
                raise DatasetError(
                    f"--remove-groups {path}:{number}: no group ({error!r}): a line is such as "
                    '{"kept": "a", "duplicates": [{"id": "b"}]}'
                ) from error
        if both := kept & here:
            raise DatasetError(
                f"--remove-groups {path}: {min(both)} stays in one group and goes in another; "
                "names must be unique: choose the field that names a text with --id-key"
            )
        gone |= here
    return frozenset(gone)
