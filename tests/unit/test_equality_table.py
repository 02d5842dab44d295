"""The table of what equals stock, written from the reports of the ranks."""

import equality_table


def report(**comparisons):
    return {
        "comparisons": comparisons,
        "columns": {"a": dict.fromkeys(equality_table.ABOUT, "x y")},
    }


def test_a_written_table_reads_as_the_runs_gave_it(tmp_path, monkeypatch):
    monkeypatch.setattr(equality_table, "DOCS", tmp_path)
    resumed = "resume | stride 2, ratio 0.7 to stock"
    one = report(**{"a | all-host": [], "a | dynamic, prefetched": [], resumed: []})
    two = [report(**{"a | all-host": []}), report(**{"a | all-host": ["moments"]})]
    cells = equality_table.cells_of({1: [one], 2: two})
    assert cells == {
        ("a", "all-host"): "1 2:differs",
        ("a", "dynamic, prefetched"): "1",
        ("saved by stride 2, ratio 0.7", "stock"): "1",
        **{("a", name): "x y" for name in equality_table.ABOUT},
    }
    equality_table.write(cells)
    assert equality_table.read() == cells
    assert "by ranks: 3 on 1, 0 on 2." in (tmp_path / "equality.md").read_text()


def test_the_page_in_docs_is_that_of_the_table():
    page = (equality_table.DOCS / "equality.md").read_text()
    assert page == equality_table.page(equality_table.read())
