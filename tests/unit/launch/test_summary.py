import json
from xml.etree import ElementTree

import pytest

from launch.sweep_index import write_summary


@pytest.fixture
def sweep(tmp_path):
    """Three points of two repeats: ok, failed and left out; the second repeats were not made."""
    folder, runs = tmp_path / "basic", []
    for name, status in (("tiny one", "ok"), ("tiny \x1b[31mtwo", "oom-host")):
        run_dir = f"log-{status}/run-001"
        (folder / run_dir).mkdir(parents=True)
        cause = "" if status == "ok" else "no\x00memory <&>"
        about = {"status": status, "seconds": 2.5, "cause": cause, "last_lines": ["a", "b\x1b"]}
        (folder / run_dir / "status.json").write_text(json.dumps(about))
        runs.append({"name": name, "repeat": 1, "run_dir": run_dir, "status": status})
    points = [{"name": run["name"], "repeats": 2} for run in runs]
    points.append({"name": "tiny three", "repeats": 1, "skipped": "needs a GPU"})
    index = {"name": "basic", "study": {"name": "own"}, "points": points, "runs": runs}
    (folder / "sweep.json").write_text(json.dumps(index))
    (folder / "tables").mkdir()
    findings = [
        {"label": "tiny two", "verdict": "differs from one", "holds": False},
        {"label": "tiny three", "verdict": "equal to one", "holds": True},
    ]
    (folder / "tables" / "findings.json").write_text(json.dumps({"findings": findings}))
    return folder


def test_a_summary_has_every_run_and_comparison(sweep):
    write_summary(sweep, 1, has_findings=True)
    found = json.loads((sweep / "summary.json").read_text())
    assert (found["sweep"], found["study"], found["exit_code"]) == ("basic", "own", 1)
    assert found["counts"] == {"ok": 1, "oom-host": 1, "not run": 2, "left out": 1}
    assert [run["status"] for run in found["runs"]] == [
        *("ok", "oom-host", "not run", "not run", "left out")
    ]
    assert found["runs"][1]["cause"] == "no\x00memory <&>"
    assert [finding["holds"] for finding in found["findings"]] == [False, True]


def test_junit_fails_what_is_not_ok_and_skips_what_was_not_run(sweep):
    write_summary(sweep, 1, has_findings=True)
    suite = ElementTree.parse(sweep / "junit.xml").getroot()
    shown = {key: suite.get(key) for key in ("name", "tests", "failures", "skipped", "time")}
    assert shown == {
        "name": "basic", "tests": "7", "failures": "2", "skipped": "3", "time": "5.000"
    }  # fmt: skip
    cases = {(case.get("classname"), case.get("name")): case for case in suite}
    failed = cases["basic.runs", "tiny ?[31mtwo #1"].find("failure")
    assert (failed.get("type"), failed.get("message")) == ("oom-host", "no?memory <&>")
    assert failed.text == "a\nb?"
    assert cases["basic.runs", "tiny one #1"].find("failure") is None
    assert cases["basic.runs", "tiny one #2"].find("skipped").get("message") == "not run"
    assert cases["basic.runs", "tiny three #1"].find("skipped").get("message") == "needs a GPU"
    differs = cases["basic.comparisons", "tiny two"].find("failure")
    assert differs.get("message") == "differs from one"
    assert cases["basic.comparisons", "tiny three"].find("failure") is None


def test_comparisons_of_an_earlier_call_are_not_told(sweep):
    write_summary(sweep, 130, has_findings=False)
    assert json.loads((sweep / "summary.json").read_text())["findings"] == []
    assert "comparisons" not in (sweep / "junit.xml").read_text()


def test_a_file_that_cannot_be_written_is_said(sweep, capsys):
    (sweep / "junit.xml").mkdir()
    write_summary(sweep, 0, has_findings=True)
    assert "junit.xml: not written: " in capsys.readouterr().out
