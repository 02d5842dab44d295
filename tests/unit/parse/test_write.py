import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from parse.records import LogError
from parse.tables import check_ours, write_table

TYPES = {"path": "string", "n": "Int64", "x": "Float64"}


def test_a_table_is_a_csv_and_a_parquet_file_of_stated_types(tmp_path):
    table = [("a", 1, 1), ('b,"\n', None, 0.1), (None, 2**63, None), ("", -3, float("nan"))]
    rows = [dict(zip(TYPES, row, strict=True)) for row in table]
    write_table(tmp_path / "t.csv", rows, TYPES)
    text = (tmp_path / "t.csv").read_bytes().decode()
    assert text == 'path,n,x\na,1,1.0\n"b,""\n",,0.1\n,,\n,-3,\n'
    found = pq.read_table(tmp_path / "t.parquet")
    assert [str(field.type) for field in found.schema] == ["large_string", "int64", "double"]
    assert found.to_pydict() == {
        "path": ["a", 'b,"\n', None, None], "n": [1, None, None, -3], "x": [1.0, 0.1, None, None],
    }  # fmt: skip


def test_an_empty_table_keeps_its_columns(tmp_path):
    write_table(tmp_path / "t.csv", [], TYPES)
    assert (tmp_path / "t.csv").read_text() == "path,n,x\n"
    assert pq.read_schema(tmp_path / "t.parquet").names == list(TYPES)


@pytest.mark.parametrize("name", ["t.csv", "t.parquet"])
def test_a_users_file_is_refused(tmp_path, name):
    (tmp_path / name).write_bytes(b"my own")
    with pytest.raises(LogError, match=rf"{name}: not a table of this parser"):
        check_ours(tmp_path / "t.csv", "path")
    assert (tmp_path / name).read_bytes() == b"my own"


def test_a_users_parquet_file_is_told_by_its_first_column(tmp_path):
    pq.write_table(pa.table({"mine": [1]}), tmp_path / "t.parquet")
    with pytest.raises(LogError):
        check_ours(tmp_path / "t.csv", "path")
    write_table(tmp_path / "u.csv", [], TYPES)
    check_ours(tmp_path / "u.csv", "path")


def test_no_spreadsheet_runs_what_a_cell_says(tmp_path):
    texts = ["=HYPERLINK(0)", "+x", "-x", "@x", "'=x", "-0.5", "-inf", "a=b", "+3e5"]
    shown = ["'=HYPERLINK(0)", "'+x", "'-x", "'@x", "''=x", "-0.5", "-inf", "a=b", "+3e5"]
    write_table(tmp_path / "t.csv", [{"path": text, "n": -1, "x": -0.5} for text in texts], TYPES)
    lines = (tmp_path / "t.csv").read_text().splitlines()[1:]
    assert lines == [f"{text},-1,-0.5" for text in shown]
    assert pq.read_table(tmp_path / "t.parquet")["path"].to_pylist() == texts
