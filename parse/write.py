"""Tables to files: each as CSV and as Parquet, with the same types and the same content.

Columns are lists. A missing value is None: an empty cell, a null.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from parse.errors import LogError

Columns = dict[str, list[Any]]
"""Values by column, all of the same length."""

_LARGEST = 2**63 - 1
FIRST_COLUMN = "path"
"""Most tables of ours begin with it; a file that does not is not replaced."""


def empty_columns(types: Mapping[str, str]) -> Columns:
    """No rows."""
    return {name: [] for name in types}


def write_table(path: Path, columns: Columns, types: Mapping[str, str]) -> None:
    """Write ``path`` as CSV and the Parquet file beside it.

    Args:
        path: The CSV; the Parquet file has its stem.
        columns: The table.
        types: Column to ``string``, ``Int64`` or ``Float64``.

    Raises:
        OSError: a file cannot be written.
    """
    clean = {name: _cleaned(columns[name], kind) for name, kind in types.items()}
    replace_text(path, _csv(clean, types))
    _replace_bytes(path.with_suffix(".parquet"), _parquet(clean, types))


def check_ours(path: Path, first_column: str = FIRST_COLUMN) -> None:
    """Refuse to replace a file that is not a table of ours, which begins with ``first_column``.

    Raises:
        LogError: ``path``, a CSV, or the Parquet file beside it is not one of ours.
        OSError: it cannot be read.
    """
    beside = path.with_suffix(".parquet")
    for file, ours in ((path, _is_our_csv), (beside, _is_our_parquet)):
        if file.exists() and not ours(file, first_column):
            raise LogError(f"{file}: not a table of this parser; choose another folder")


def check_our_json(path: Path, key: str) -> None:
    """Refuse to replace a JSON file that is not one of ours: an object that has this key.

    Raises:
        LogError: ``path`` is not one of ours.
    """
    try:
        ours = key in json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return
    except (ValueError, TypeError):
        ours = False
    if not ours:
        raise LogError(f"{path}: not a file of this parser; choose another folder")


def remove_table(path: Path) -> None:
    """Delete a table of ours that there are no rows for any more.

    Raises:
        LogError: it is not one of ours.
        OSError: it cannot be deleted.
    """
    check_ours(path)
    for file in (path, path.with_suffix(".parquet")):
        file.unlink(missing_ok=True)


def replace_text(path: Path, text: str) -> None:
    """Write a file so that a reader finds the old one or the new one, never a part of it."""
    _replace_bytes(path, text.encode(errors="replace"))


def _replace_bytes(path: Path, data: bytes) -> None:
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_bytes(data)
        beside.replace(path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise


def _csv(columns: Columns, types: Mapping[str, str]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(columns)
    texts = [set(columns[name]) for name, kind in types.items() if kind == "string"]
    # The csv module leaves a bare CR unquoted, which ends the row for whoever reads it.
    has_cr = any("\r" in value for values in texts for value in values if value)
    if has_cr:
        rows = csv.writer(text, lineterminator="\n", quoting=csv.QUOTE_NONNUMERIC)
    else:
        rows = csv.writer(text, lineterminator="\n")
    rows.writerows(zip(*columns.values(), strict=True))
    return text.getvalue()


def _parquet(columns: Columns, types: Mapping[str, str]) -> bytes:
    # Imported here: what only reads logs need not wait for it.
    import pyarrow as pa
    import pyarrow.parquet as pq

    kinds = {"string": pa.string(), "Int64": pa.int64(), "Float64": pa.float64()}
    schema = pa.schema([(name, kinds[kind]) for name, kind in types.items()])
    arrays = [pa.array(columns[field.name], type=field.type) for field in schema]
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_arrays(arrays, schema=schema), buffer)
    return buffer.getvalue()


def _cleaned(values: Sequence[Any], kind: str) -> list[Any]:
    """Values that both forms can hold."""
    if kind == "string":
        return _cleaned_texts(values)
    if kind == "Float64":
        return [None if value is None else _float(value) for value in values]
    return [
        None if value is None or not -_LARGEST <= value <= _LARGEST else int(value)
        for value in values
    ]


def _cleaned_texts(values: Sequence[Any]) -> list[str | None]:
    known: dict[Any, str | None] = {None: None, "": None}
    for value in set(values) - known.keys():
        # An empty text and a missing one are the same cell of a CSV.
        known[value] = str(value).encode(errors="replace").decode() or None
    return [known[value] for value in values]


def _float(value: float) -> float | None:
    try:
        number = float(value)
    except OverflowError:
        return None
    return None if math.isnan(number) else number


def _is_our_csv(path: Path, first_column: str) -> bool:
    with path.open("rb") as file:
        return file.read(len(first_column) + 1) == f"{first_column},".encode()


def _is_our_parquet(path: Path, first_column: str) -> bool:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        names = pq.read_schema(path).names
    except pa.ArrowInvalid:
        return False
    return bool(names[:1] == [first_column])
