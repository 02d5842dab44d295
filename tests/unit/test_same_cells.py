import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "support" / "same_cells.py"
spec = importlib.util.spec_from_file_location("same_cells", SCRIPT)
same_cells = importlib.util.module_from_spec(spec)
spec.loader.exec_module(same_cells)

TABLE = "path,time_ms,label\na.log,1.5,one\nb.log,,two\n"


@pytest.fixture
def folders(tmp_path):
    def write(before=TABLE, after=TABLE, name="runs.csv"):
        for folder, text in (("before", before), ("after", after)):
            path = tmp_path / folder / "sweep" / "tables" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if text is not None:
                path.write_text(text)
        return tmp_path / "before", tmp_path / "after"

    return write


@pytest.mark.parametrize(
    ("old", "new", "difference"),
    [
        ("1.5", "1.50", None),
        ("1.5", "1.5000000000000002", "row 1, time_ms: '1.5' before, '1.5000000000000002' after"),
        ("1.5", "15e-1", None),
        ("b.log,,", "b.log,0,", "row 2, time_ms: '' before, '0' after"),
        ("one", "nan", "row 1, label: 'one' before, 'nan' after"),
        ("two\n", "two\nc.log,1,three\n", "2 rows before, 3 after"),
        ("label", "title", "column 'label' is gone"),
    ],
)
def test_every_cell_counts(folders, old, new, difference):
    found = same_cells.differences(*folders(after=TABLE.replace(old, new)))
    assert (found[:1] or [None]) == [difference and f"sweep/tables/runs.csv: {difference}"]
    assert bool(found) is bool(difference)


def test_numbers_that_a_float_cannot_tell_apart_differ(folders):
    big = TABLE.replace("1.5", "9007199254740993")
    assert len(same_cells.differences(*folders(big, big.replace("993", "992")))) == 1


def test_columns_of_another_order_and_ignored_ones_are_equal(folders):
    after = "label,path,time_ms,more\none,a.log,9,1\ntwo,b.log,,2\n"
    before, after = folders(after=after)
    assert same_cells.main([str(before), str(after), "--ignore", "time_ms", "more"]) == 0
    assert same_cells.main([str(before), str(after), "--ignore", "more"]) == 1


def test_a_table_of_one_folder_alone_is_said(folders):
    folders()
    before, after = folders(after=None, name="memory.csv")
    assert same_cells.differences(before, after) == [f"sweep/tables/memory.csv: only in {before}"]
    assert same_cells.differences(after / "nothing", after) == [
        f"{after / 'nothing'}: no *.csv below it"
    ]
