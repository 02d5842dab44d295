"""The index of a results folder: its sweeps, and numbers of one point from several sources."""

import json
import re

import pytest
from programs import report as main

from parse.index import results_folder

TIMES = {"forward_ms": 10.0, "backward_ms": 20.0, "update_ms": 30.0}


def predicted(folder, machine, *runs):
    """A simulated sweep: engine, source, iteration_ms and changed fields of each run."""
    entries = []
    for number, (engine, source, iteration_ms, fields) in enumerate(runs):
        run = folder / f"run-{number}"
        run.mkdir(parents=True)
        point = {
            "model": {"name": "tiny", "layers": 2, "hidden": 64, "heads": 4, "seq_length": 64},
            "engine": engine, "stride": 2 if engine == "hybrid" else 0, "tp": 1, "dp": 1,
            "global_batch_size": 2, "micro_batch_size": 1, "offload_ratio": 1.0,
            "subgroup_numel": 1_000_000, **fields,
        }  # fmt: skip
        run_json = {"source": source, "point": point, "log": "values.json"}
        (run / "run.json").write_text(json.dumps(run_json))
        (run / "status.json").write_text(json.dumps({"status": "ok"}))
        (run / "values.json").write_text(json.dumps({**TIMES, "iteration_ms": iteration_ms}))
        entries.append({"name": engine, "engine": engine, "log": "values.json", "status": "ok",
                        "run_dir": run.name})  # fmt: skip
    index = {"name": folder.name, "simulated": {"machine": machine}, "runs": entries}
    (folder / "sweep.json").write_text(json.dumps(index))
    assert main([str(folder)]) == 0


@pytest.fixture
def results(sweep_writer, tmp_path):
    """Two sweeps that measured the same points, and two machines that were simulated."""
    results = tmp_path / "results"
    for name, seconds in (("basic", (9.0, 0.1, 0.1)), ("again", (9.0, 0.2, 0.2))):
        sweep_writer.folder = results / name
        runs = [(engine, stride, {"seconds": seconds, "losses": (9.0, 8.5, 8.0)})
                for engine, stride in (("vanilla", 0), ("hybrid", 2))]  # fmt: skip
        sweep_writer.write_runs(runs, name=name, description=f"what {name} is for")
        assert main([str(results / name)]) == 0
    hybrid, other = ("hybrid", "simulated", 80.0, {}), {"stride": 3}
    predicted(results / "simulated-a" / "basic", "a", ("vanilla", "simulated", 110.0, {}),
              ("vanilla", "published", 120.0, {}), hybrid,
              ("hybrid", "simulated", 70.0, other))  # fmt: skip
    predicted(results / "simulated-b" / "basic", "b", ("vanilla", "simulated", 50.0, {}))
    return results


def table(page, section):
    """Cells of the rows of a section's table."""
    body = page.split(f'id="{section}"')[1].split("</section>")[0].split("<tbody>")[1]
    rows = re.findall(r"<tr>(.*?)</tr>", body, re.DOTALL)
    cells = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.DOTALL) for row in rows]
    return [[re.sub(r"<[^>]*>", " ", cell).strip() for cell in row] for row in cells]


def test_every_sweep_is_listed_with_its_report_and_what_came_out(results, capsys):
    assert main([str(results), "--index"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(results / "index.html")
    page = (results / "index.html").read_text()
    for link in ("basic", "again", "simulated-a/basic", "simulated-b/basic"):
        assert f'href="./{link}/report.html"' in page
        assert (results / link / "report.html").is_file()
    rows = table(page, "sweeps")
    assert [row[2] for row in rows] == [
        "measured on a CPU", "measured on a CPU", "simulated on a", "simulated on b",
    ]  # fmt: skip
    assert "what basic is for" in rows[1][0]
    assert rows[1][3:5] == ["2 ok", "as expected"]
    assert "equal to vanilla" in rows[1][5]


def test_measured_stands_beside_simulated_and_published_of_the_same_point(results):
    assert main([str(results), "--index"]) == 0
    page = (results / "index.html").read_text()
    assert table(page, "beside") == [
        # point, sweep, measured, on a, on b, published, off by of these three
        ["tiny vanilla", "again", "200", "110", "50", "120", "-45%", "-75%", "-40%"],
        ["tiny vanilla", "basic", "100", "110", "50", "120", "+10%", "-50%", "+20%"],
        ["tiny hybrid stride 2", "again", "200", "80", "", "", "-60%", "", ""],
        ["tiny hybrid stride 2", "basic", "100", "80", "", "", "-20%", "", ""],
    ]
    assert "stride 3" not in page, "one source alone knows it"


def test_a_report_may_bring_the_index_up_to_date(results, capsys):
    assert main([str(results / "again"), "--index"]) == 0
    assert (results / "index.html").is_file()
    folder = results / "simulated-a" / "basic"
    assert results_folder(folder) == results_folder(results / "basic") == results.resolve()
    # The page is ours to replace, and a user's is not.
    assert main([str(results), "--index"]) == 0
    (results / "index.html").write_text("mine")
    capsys.readouterr()
    assert main([str(results), "--index"]) == 2
    assert "is not an index of ours; move it away" in capsys.readouterr().err
    assert main([str(results / "again"), "--index"]) == 0, "the report is there"
    assert "no index: " in capsys.readouterr().err
    assert (results / "index.html").read_text() == "mine"


def test_what_names_say_is_text_in_the_index_too(results):
    findings = results / "basic" / "tables" / "findings.json"
    evil = "<script>alert(1)</script>\\u202e"
    kept = json.loads(findings.read_text())
    kept |= {"description": evil, "report_of_sweep": evil}
    findings.write_text(json.dumps(kept))
    (results / "again" / "tables" / "runs.csv").unlink()  # a sweep that is being written
    assert main([str(results), "--index"]) == 0
    page = (results / "index.html").read_text()
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert "\u202e" not in page
    assert "default-src &#39;none&#39;" in page


def test_a_folder_without_reports_is_one_line_and_exit_code_2(tmp_path, capsys):
    assert main([str(tmp_path), "--index"]) == 2
    assert capsys.readouterr().err == (
        f"parse.report: error: {tmp_path}: holds no sweep with a report\n"
    )
