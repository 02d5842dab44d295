"""Tables to files: each as CSV and as Parquet, with the same types and the same content.

Rows are dicts by column. A missing value is None or no key at all: an empty cell, a null.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from parse.errors import LogError

Rows = Sequence[Mapping[str, Any]]

_LARGEST = 2**63 - 1
_FORMULA = re.compile(r"'*[-=+@\t\r]")
"""What a spreadsheet takes for a formula, or would be taken for the guard of one."""
FIRST_COLUMN = "path"
"""Most tables of ours begin with it; a file that does not is not replaced."""


def write_table(path: Path, rows: Rows, types: Mapping[str, str]) -> None:
    """Write ``path`` as CSV and the Parquet file beside it.

    Args:
        path: The CSV; the Parquet file has its stem.
        rows: The table; what ``types`` does not name is left out.
        types: Column to ``string``, ``Int64`` or ``Float64``.

    Raises:
        OSError: a file cannot be written.
    """
    # Imported here: what only reads logs need not wait for it.
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {
        name: _mapped([row.get(name) for row in rows], partial(_cell, kind=kind))
        for name, kind in types.items()
    }
    texts = {name: _mapped(columns[name], guard) for name in types if types[name] == "string"}
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(types)
    # The csv module leaves a bare CR unquoted, which ends the row for whoever reads it.
    has_cr = any("\r" in value for values in texts.values() for value in set(values) - {None})
    dialect: dict[str, Any] = {"quoting": csv.QUOTE_NONNUMERIC} if has_cr else {}
    cells = zip(*(columns | texts).values(), strict=True)
    csv.writer(text, lineterminator="\n", **dialect).writerows(cells)
    replace_text(path, text.getvalue())
    kinds = {"string": pa.string(), "Int64": pa.int64(), "Float64": pa.float64()}
    schema = pa.schema([(name, kinds[kind]) for name, kind in types.items()])
    buffer = io.BytesIO()
    pq.write_table(pa.table(columns, schema=schema), buffer)
    _replace_bytes(path.with_suffix(".parquet"), buffer.getvalue())


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


def guard(cell: str | float | None) -> str | float | None:
    """A cell that no spreadsheet takes for a formula: such a text gets an apostrophe in front.

    Numbers stay as they are, those in a column of texts too.
    """
    if not isinstance(cell, str) or not _FORMULA.match(cell):
        return cell
    try:
        float(cell)
    except ValueError:
        return f"'{cell}"
    return cell


def unguard(cell: str) -> str:
    """The text that was guarded."""
    return cell[1:] if cell.startswith("'") and _FORMULA.match(cell) else cell


def _mapped(values: Sequence[Any], change: Callable[[Any], Any]) -> list[Any]:
    """The values changed, each distinct one once: most of a column's cells are alike."""
    known = {value: change(value) for value in set(values)}
    return [known[value] for value in values]


def _cell(value: object, kind: str) -> str | float | None:
    """A value as both forms can hold it; None where there is none."""
    if value is None:
        return None
    if kind == "string":
        # An empty text and a missing one are the same cell of a CSV.
        return str(value).encode(errors="replace").decode() or None
    assert isinstance(value, int | float)
    if kind == "Int64":
        return int(value) if abs(value) <= _LARGEST else None
    try:
        return None if math.isnan(value) else float(value)
    except OverflowError:
        return None


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
