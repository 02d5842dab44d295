"""What a table's CSV holds is what it was given, and nothing that a spreadsheet runs."""

import csv
import io
import math
import re
import tempfile
from pathlib import Path

import hypothesis.strategies as st
from hypothesis import example, given, settings

from parse.tables import write_table

COLUMNS = ("path", "n", "x", "text")
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


def as_given(cell):
    """The text that a cell stands for."""
    assert not cell or cell[0] not in "=+-@\t\r" or is_number(cell), "a spreadsheet runs it"
    return cell[1:] if re.match(r"''*[-=+@\t]", cell) else cell


def shown(text):
    return (text or "").encode(errors="replace").decode().replace("\r", " ")


@settings(deadline=None, max_examples=80)
@given(table=st.lists(rows, max_size=6))
@example(table=[("\ud800", 2**63, math.nan, "\r"), ("", -(2**63), None, '"')])
@example(table=[("=1+1", 1, 1.0, "'=1+1"), ("-0.5", 1, None, "''@a"), ("+", 1, None, "-inf")])
def test_a_table_reads_back(table):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t.csv"
        write_table(path, [dict(zip(COLUMNS, row, strict=True)) for row in table], COLUMNS)
        text = path.read_bytes().decode()
    found = list(csv.DictReader(io.StringIO(text, newline="")))
    for cells, (name, number, value, words) in zip(found, table, strict=True):
        assert [as_given(cells["path"]), as_given(cells["text"])] == [shown(name), shown(words)]
        assert cells["n"] == ("" if number is None else str(number))
        known = value is not None and value == value
        assert (float(cells["x"]) == value) if known else cells["x"] == ""
