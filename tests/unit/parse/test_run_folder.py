import json

import pytest
from programs import parse_logs as main, report as report_main
from rows import rows

from configs.study import default_study
from parse.run import find_logs, label_runs, read_run, read_sweep


def edit(path, **fields):
    table = json.loads(path.read_text())
    path.write_text(json.dumps({**table, **fields}))


def set_run(folder, engine_part, **fields):
    edit(next(folder.glob(f"*{engine_part}*/run-001/run.json")), **fields)


def test_a_run_without_a_log_has_the_sweeps_word(sweep_writer):
    folder = sweep_writer.write(stock={"log": False})
    index = json.loads((folder / "sweep.json").read_text())
    index["runs"][0] |= {"repeat": 3, "status": "hang"}
    edit(folder / "sweep.json", **index)
    run_dir = folder / index["runs"][0]["run_dir"]
    (run_dir / "status.json").unlink()
    run = read_sweep(folder)[0]
    assert (run.repeat, run.status) == (3, "hang")
    (run_dir / "status.json").write_text('{"status": "failed"}')
    set_run(folder, "flush_async0", repeat=2)
    run = read_sweep(folder)[0]
    assert (run.repeat, run.status) == (2, "failed")


def test_repeats_number_labels_only_where_run_json_counts_them(sweep_writer):
    folder = sweep_writer.write()
    set_run(folder, "flush_async0", repeat=2)
    runs = read_sweep(folder)
    label_runs(runs)
    assert [run.label for run in runs] == [
        "tiny stock #2",
        "tiny all-host",
        "tiny stride 2",
    ]


def test_columns_of_the_run_come_from_run_json(sweep_writer, tmp_path):
    folder = sweep_writer.write()
    path = next(folder.glob("*flush_async0*/run-001/run.json"))
    point = json.loads(path.read_text())["point"] | {"hog_share": 0.25, "seed": 77}
    edit(path, repeat=4, run_id="x/run-004", point_key="abc", started="2031-01-02", point=point)
    assert main([str(folder), "--out", str(tmp_path / "out")]) == 0
    cells = rows(tmp_path / "out" / "runs.csv")[0]
    expected = {"repeat": "4", "run_id": "x/run-004", "point_key": "abc", "started": "2031-01-02",
                "hog_share": "0.25", "seed": "77", "accumulation": "2"}  # fmt: skip
    assert {name: cells[name] for name in expected} == expected
    assert float(cells["update_rate"]) == pytest.approx(12345 / 0.03325)
    assert float(cells["samples_per_s"]) == pytest.approx(2 / (0.1 + 0.0123456789 * 2.5))
    assert cells["case"] == "tiny, seed 77, hogged 0.25"


@pytest.mark.parametrize(
    ("before", "busy"),
    [
        ({"busy": "others used 70% of its cores"}, "others used 70% of its cores"),
        ({"busy": ""}, ""),
    ],
)
def test_a_run_says_that_the_machine_was_busy(sweep_writer, tmp_path, before, busy):
    folder = sweep_writer.write()
    edit(next(folder.glob("*flush_async0*/run-001/run.json")), provenance={"before": before})
    notes = read_run(find_logs(folder)[0]).log.notes
    assert [note for note in notes if "busy" in note] == (
        [f"the machine was busy when the run began: {busy}"] if busy else []
    )
    assert main([str(folder), "--out", str(tmp_path / "out")]) == 0
    assert rows(tmp_path / "out" / "runs.csv")[0]["busy"] == busy


@pytest.mark.parametrize("repeat", [["a"], {}, "x"])
def test_a_repeat_that_is_no_number_leaves_its_run_out(sweep_writer, tmp_path, capsys, repeat):
    folder = sweep_writer.write_runs(
        [("stock", 0, {}), ("stride", 2, {}), ("stride", 2, {"repeat": 2})]
    )
    set_run(folder, "prefetch1", repeat=repeat)
    assert report_main([str(folder)]) == 1
    words = f"run.json is damaged: its repeat is {json.dumps(repeat)}, no number"
    out = capsys.readouterr().out
    assert f"run failed ({words})" in out
    assert "tiny stride 2 #2: equal to stock" in out
    statuses = [row["status"] for row in rows(folder / "tables" / "runs.csv")]
    assert statuses == ["ok", "failed", "ok"]
    assert main([str(folder), "--out", str(tmp_path / "out")]) == 0


def test_points_keep_their_names_unless_two_points_share_one(sweep_writer):
    names = {"stock": "mine", "stride": "yours"}
    named = {engine: {"point": {"name": name}} for engine, name in names.items()}
    runs = read_sweep(sweep_writer.write(**named))
    label_runs(runs)
    assert [run.label for run in runs] == ["mine", "tiny all-host", "yours"]
    for run in runs:
        run.point["name"] = "ours"
    label_runs(runs)
    assert [run.label for run in runs] == [
        "tiny stock", "tiny all-host", "tiny stride 2",
    ]  # fmt: skip


def test_a_row_is_named_as_by_the_command_that_lists_it(sweep_writer):
    """Not as by the one that ran it; what the command set is told of runs that all have it."""
    fields = {"point": {"name": "tiny stock", "subgroup_numel": 200_000}}
    asked = {"fields": {"subgroup_numel": "200000"}}
    folder = sweep_writer.write_runs([("stock", 0, fields)], asked=asked)
    for name in ("tiny stock", "tiny subgroup 200k stock"):
        index = json.loads((folder / "sweep.json").read_text())
        index["runs"][0]["name"] = name
        edit(folder / "sweep.json", **index)
        assert report_main([str(folder)]) == 0
        (row,) = rows(folder / "tables" / "runs.csv")
        assert (row["label"], row["case"]) == (name, "tiny, subgroup 200k")
    edit(folder / "sweep.json", asked={})
    assert report_main([str(folder)]) == 0
    assert rows(folder / "tables" / "runs.csv")[0]["case"] == "tiny"


BEFORE = {"stock": "vanilla", "all-host": "async-gradients", "stride": "hybrid"}


@pytest.mark.parametrize("newest_first", [True, False])
def test_results_under_earlier_names_of_engines_are_read(sweep_writer, tmp_path, newest_first):
    """Alone as they are, beside today's by the names that engines have now."""
    study = default_study().as_table()
    engines = {BEFORE.get(name, name): row for name, row in study["engines"].items()}
    engines = {name: {**row, "aliases": []} for name, row in engines.items()}
    older = {**study, "reference": "vanilla", "engines": engines}
    writer = type(sweep_writer)(tmp_path / "older")
    before = read_sweep(writer.write_runs([("vanilla", 0, {}), ("hybrid", 2, {})], study=older))
    assert label_runs(before).reference == "vanilla"
    assert [run.label for run in before] == ["tiny vanilla", "tiny hybrid stride 2"]
    today = read_sweep(sweep_writer.write_runs([("stock", 0, {}), ("stride", 2, {})], study=study))
    runs = [*today, *before] if newest_first else [*before, *today]
    assert label_runs(runs).reference == "stock"
    assert [run.engine for run in runs] == ["stock", "stride"] * 2


def test_a_result_of_older_code_is_marked_in_table_and_report(sweep_writer, tmp_path):
    folder = sweep_writer.write()
    index = json.loads((folder / "sweep.json").read_text())
    index["runs"][1]["older"] = "code changed: launch/train_loop/loop.py"
    edit(folder / "sweep.json", **index)
    assert report_main([str(folder)]) == 0
    marks = [row["older"] for row in rows(folder / "tables" / "runs.csv")]
    assert marks == ["", "code changed: launch/train_loop/loop.py", ""]
    for name in ("report.md", "report.html"):
        text = (folder / name).read_text().replace("\\", "")
        assert text.count("result of older code: code changed: launch/train_loop/loop.py") == 1, (
            name
        )
