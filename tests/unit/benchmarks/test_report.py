"""Tables, and files that are not overwritten."""

import json

import pytest

from benchmarks.report import BenchmarkError, as_table, check_output, shown, write_json


def test_columns_line_up():
    text = as_table(
        ["row", "s", "why"], [["stock", "1.00", "no"], ["ours", "12.00", "yes"]], (0, 2)
    )
    assert text.splitlines() == [
        "row        s  why",
        "stock   1.00  no",
        "ours   12.00  yes",
    ]


def test_what_was_not_measured_is_a_dash():
    assert shown(None) == "-"
    assert shown(1.234, 1, " s") == "1.2 s"


def test_nothing_is_overwritten(tmp_path):
    path = tmp_path / "a b" / "figures.json"
    path.parent.mkdir()
    write_json(path, {"x": 1})
    with pytest.raises(BenchmarkError, match="already there"):
        write_json(path, {"x": 2})
    with pytest.raises(BenchmarkError, match="already there"):
        check_output(path)
    assert json.loads(path.read_text()) == {"x": 1}


def test_a_missing_folder_is_said_before_anything_is_measured(tmp_path):
    with pytest.raises(BenchmarkError, match="no folder"):
        check_output(tmp_path / "none" / "figures.json")
    check_output(None)
