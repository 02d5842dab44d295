"""The index of a results folder: its sweeps, and what came out of them."""

import json
import re

import pytest
from programs import report as main


@pytest.fixture
def results(sweep_writer, tmp_path):
    """Two sweeps that were measured, and one that was simulated."""
    results = tmp_path / "results"
    for name in ("basic", "again"):
        sweep_writer.folder = results / name
        runs = [("vanilla", 0, {}), ("hybrid", 2, {})]
        sweep_writer.write_runs(runs, name=name, description=f"what {name} is for")
        assert main([str(results / name)]) == 0
    run = results / "simulated-a" / "basic" / "run-0"
    run.mkdir(parents=True)
    point = {"model": {"name": "tiny"}, "engine": "vanilla"}
    run_json = {"source": "simulated", "point": point, "log": "values.json"}
    (run / "run.json").write_text(json.dumps(run_json))
    (run / "status.json").write_text('{"status": "ok"}')
    (run / "values.json").write_text('{"iteration_ms": 80}')
    index = {"simulated": {"machine": "a"}, "runs": [{"log": "values.json", "run_dir": "run-0"}]}
    (run.parent / "sweep.json").write_text(json.dumps(index))
    assert main([str(run.parent)]) == 0
    return results


def rows(page):
    """Cells of the rows of the table of sweeps."""
    found = re.findall(r"<tr>(.*?)</tr>", page.split("<tbody>")[1], re.DOTALL)
    cells = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.DOTALL) for row in found]
    return [[re.sub(r"<[^>]*>", " ", cell).strip() for cell in row] for row in cells]


def test_every_sweep_is_listed_with_its_report_and_what_came_out(results, capsys):
    assert main([str(results), "--index"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(results / "index.html")
    page = (results / "index.html").read_text()
    for link in ("basic", "again", "simulated-a/basic"):
        assert f'href="./{link}/report.html"' in page
    found = rows(page)
    assert [row[2] for row in found] == ["measured on a CPU", "measured on a CPU", "simulated on a"]
    assert "what basic is for" in found[1][0]
    assert found[1][3:5] == ["2 ok", "as expected"]
    assert "equal to vanilla" in found[1][5]


def test_a_report_may_bring_the_index_up_to_date(results, capsys):
    for folder in (results / "again", results / "simulated-a" / "basic"):
        (results / "index.html").unlink(missing_ok=True)
        assert main([str(folder), "--index"]) == 0
        assert (results / "index.html").is_file()
    # The page is ours to replace, and a user's is not.
    assert main([str(results), "--index"]) == 0
    (results / "index.html").write_text("mine")
    assert main([str(results), "--index"]) == 2
    assert "not an index of ours" in capsys.readouterr().err
    assert (results / "index.html").read_text() == "mine"
    assert main([str(results / "again"), "--index"]) == 0, "the report itself is there"


def test_what_a_sweep_says_of_itself_is_text(results):
    evil, findings = "<script>alert(1)</script>\u202e", results / "again/tables/findings.json"
    findings.write_text(json.dumps(json.loads(findings.read_text()) | dict.fromkeys(
        ("description", "name", "study"), evil)))  # fmt: skip
    assert main([str(results), "--index"]) == 0
    page = (results / "index.html").read_text()
    assert page.count("&lt;script&gt;alert(1)") == 3
    assert "<script>alert" not in page
    assert "\u202e" not in page
    assert "default-src &#39;none&#39;" in page


def test_a_folder_without_reports_is_one_line_and_exit_code_2(tmp_path, capsys):
    assert main([str(tmp_path), "--index"]) == 2
    assert capsys.readouterr().err == (
        f"parse.report: error: {tmp_path}: holds no sweep with a report\n"
    )
