"""What became of every address so far: lines in a file that only grows, so that a run goes on."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dataset.errors import DatasetError
from dataset.files import writing

NAME = "journal.jsonl"
NOT_THERE = -1


class Journal:
    """Opens a journal; a line that was cut off is dropped with what follows it.

    Args:
        path: The file; made when missing.
        num_urls: Addresses of the list.
    """

    def __init__(self, path: Path, num_urls: int) -> None:
        self._path = path
        self._starts = array("q", [NOT_THERE]) * num_urls
        path.touch()
        end, self.num_done = 0, 0
        with path.open("rb") as file:
            for line in file:
                try:
                    number = json.loads(line)["number"]
                    is_whole = line.endswith(b"\n") and self._starts[number] == NOT_THERE
                except (ValueError, KeyError, TypeError, IndexError):
                    is_whole = False
                if not is_whole:
                    break
                self._starts[number] = end
                self.num_done += 1
                end += len(line)
        self._file = path.open("r+b", buffering=0)
        self._file.truncate(end)
        self._file.seek(end)
        self._end = end

    def has(self, number: int) -> bool:
        """Whether it is known what became of an address."""
        return self._starts[number] != NOT_THERE

    def add(self, number: int, reason: str, record: dict[str, Any] | None) -> None:
        """Note what became of an address: a record, or why there is none.

        Raises:
            DatasetError: There is no room for it.
        """
        line = json.dumps({"number": number, "reason": reason, "record": record}).encode() + b"\n"
        with writing(self._path):
            # One write, but a disk that fills up takes a part of it.
            if self._file.write(line) != len(line):
                raise DatasetError(f"{self._path}: no room: make some and run the command again")
        self._starts[number] = self._end
        self._end += len(line)
        self.num_done += 1

    def outcomes(self) -> Iterator[tuple[str, dict[str, Any] | None]]:
        """Yield reason and record of every address, in the list's order."""
        with self._path.open("rb") as file:
            for start in self._starts:
                file.seek(start)
                outcome = json.loads(file.readline())
                yield outcome["reason"], outcome["record"]

    def close(self) -> None:
        """Close the file."""
        self._file.close()
