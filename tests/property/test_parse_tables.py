"""Tables: CSV and Parquet hold the same."""

import csv
import io
import re
import tempfile
from pathlib import Path

import hypothesis.strategies as st
import pyarrow.parquet as pq
from hypothesis import example, given, settings

from parse.tables import write_table

TYPES = {"path": "string", "n": "Int64", "x": "Float64", "text": "string"}
texts = st.none() | st.text(
    st.characters(exclude_categories=()), max_size=8
)  # lone surrogates too, as in file names
rows = st.tuples(texts, st.none() | st.integers(-(2**70), 2**70), st.none() | st.floats(), texts)


def is_number(cell):
    try:
        float(cell)
    except ValueError:
        return False
    return True


def unguard(cell):
    return cell[1:] if re.match(r"''*[-=+@\t]", cell) else cell


def as_parquet(name, cell):
    """A cell of the CSV as Parquet holds it."""
    if cell == "":
        return None
    if TYPES[name] == "string":
        assert cell[0] not in "=+-@\t\r" or is_number(cell), "a spreadsheet runs it"
    return {"string": unguard, "Int64": int, "Float64": float}[TYPES[name]](cell)


@settings(deadline=None, max_examples=80)
@given(table=st.lists(rows, max_size=6))
@example(table=[("\ud800", 2**63, 1.0, "\r"), ("", -(2**63), None, '"')])
@example(table=[("=1+1", 1, 1.0, "'=1+1"), ("-0.5", 1, None, "''@a"), ("+", 1, None, "-inf")])
def test_csv_and_parquet_agree(table):
    columns = {name: [row[i] for row in table] for i, name in enumerate(TYPES)}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t.csv"
        write_table(path, [dict(zip(TYPES, row, strict=True)) for row in table], TYPES)
        text = path.read_bytes().decode()
        parquet = pq.read_table(path.with_suffix(".parquet")).to_pylist()
    found = list(csv.DictReader(io.StringIO(text, newline="")))
    assert [
        {name: as_parquet(name, cell) for name, cell in row.items()} for row in found
    ] == parquet
    assert [row["n"] for row in parquet] == [
        n if n is not None and abs(n) < 2**63 else None for n in columns["n"]
    ]
    exact = [x if x is not None and x == x else None for x in columns["x"]]
    assert [row["x"] for row in parquet] == exact
