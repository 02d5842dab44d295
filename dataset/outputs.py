"""A file that a command writes: whole under its name, or not there; packed by its ending."""

from __future__ import annotations

import gzip
import json
import lzma
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dataset.errors import DatasetError
from dataset.files import require_writable, writing
from dataset.readers.inputs import COMPRESSIONS

JSON_LINES = (".jsonl", *(f".jsonl{end}" for end in COMPRESSIONS))
TEXT_LINES = (".txt", *(f".txt{end}" for end in COMPRESSIONS))


def require_new(path: Path, endings: Sequence[str] = (), flag: str = "--output") -> None:
    """See that a file can be written and nothing has its name.

    Args:
        path: The file to write.
        endings: What its name may end in; anything when empty.
        flag: Which option gave it.

    Raises:
        DatasetError: It cannot.
    """
    if endings and not path.name.endswith(tuple(endings)):
        raise DatasetError(f"{flag} {path}: the name must end in {', '.join(endings)}")
    if path.exists():
        raise DatasetError(f"{flag}: {path} is there already; give another name")
    require_writable(path, flag)


def report_path(output: Path) -> Path:
    """Where the counts and the bad lines of a written file are."""
    return output.with_name(f"{output.name}.report.json")


def write_report(output: Path, counts: Mapping[str, int], bad_lines: Iterable[str]) -> None:
    """Write what was counted beside a file.

    Raises:
        DatasetError: There is no room for it.
    """
    facts, path = {"counts": dict(counts), "bad_lines": list(bad_lines)}, report_path(output)
    with writing(path):
        path.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


@contextmanager
def written(path: Path, *beside: Path) -> Iterator[Any]:
    """Open a file to write bytes to; it has its name once all of it is there.

    Args:
        path: The file.
        beside: What is written meanwhile and is of no use without it: removed when it fails.

    Raises:
        DatasetError: There is no room for it.
    """
    draft = path.with_name(f".unfinished-{path.name}")
    try:
        with writing(path), _packed(draft, path.suffix) as file:
            yield file
        draft.replace(path)
    except BaseException:
        for other in (draft, *beside):
            other.unlink(missing_ok=True)
        raise


@contextmanager
def _packed(path: Path, suffix: str) -> Iterator[Any]:
    if suffix == ".gz":
        # Neither a time nor the draft's name: equal contents are to give equal files.
        with path.open("wb") as raw, gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as file:
            yield file
    elif suffix == ".xz":
        with lzma.open(path, "wb") as file:
            yield file
    elif suffix == ".zst":
        import pyarrow

        with pyarrow.CompressedOutputStream(str(path), "zstd") as file:
            yield file
    else:
        with path.open("wb") as file:
            yield file
