"""Verdicts of DeepSpeed's own tests, and their report."""

import pytest

from tests.deepspeed_suite import suite


def record(outcome="passed", bits=("a",), engine=True, refused=(), offload="own"):
    found = {"engine": [engine], "bits": [*bits], "refused": [*refused], "offload": [offload]}
    return {"outcome": outcome, **found}


@pytest.mark.parametrize(
    ("stock", "ours", "expected"),
    [
        (record(), record(), suite.SAME),
        (record(), record(bits=("b",)), suite.OTHER),
        (record(), record(bits=()), suite.OTHER),
        (record(bits=()), record(bits=()), suite.PASSED),
        (record(), record(engine=False), suite.NONE),
        (record(), record("failed", refused=["no"]), suite.REFUSED),
        (record(), record("skipped", refused=["no"]), suite.REFUSED),
        (record(), record("failed", engine=False), suite.ALONE),
        (record(), record("skipped", engine=True), suite.ALONE),
        (record("failed"), None, suite.STOCK),
        (record("failed", offload="could be added"), None, suite.STOCK),
        (record("failed", offload="none"), None, suite.NONE),
        (record("skipped"), record("skipped"), suite.SKIPPED),
        (record("skipped"), None, suite.SKIPPED),
        (record(), None, suite.NONE),
    ],
)
def test_a_verdict_is_of_both_runs(stock, ours, expected):
    assert suite.verdict(stock, ours) == expected


def test_a_section_counts_every_test_and_names_what_did_not_pass():
    rows = [
        ["own", suite.SAME, "x.py::a", ""],
        ["own", suite.REFUSED, "x.py::T::b[1]", "not this: see https://a.b/c/d"],
        ["own", suite.REFUSED, "x.py::T::b[2]", "not this: see https://a.b/c/d"],
        ["added", suite.ALONE, "x.py::c", "lost `it` of 1234567 in /a/b/c.pt"],
        ["added", suite.VARIES, "x.py::c", ""],
        ["own", suite.SKIPPED, "x.py::d", "no GPU"],
        ["added", suite.NONE, "x.py::e", ""],
    ]
    text = suite.section("1.2", {"z/x": rows}, "today")
    assert "7 tests of 1 files. 1 skip" in text
    assert "and 1 have no" in text
    assert "| z/x | 1 | 0 | 2 | 0 | 0 | 0 | 0 | 0 |" in text
    assert "| z/x | 0 | 0 | 0 | 0 | 1 | 0 | 1 | 0 |" in text
    assert "- x T.b (2): `not this: see https://a.b/c/d`" in text
    assert "- x c: `lost 'it' of N in c.pt`" in text
    assert "- x c: other bits" in text
    assert "Skipped:\n\n- x d: `no GPU`" in text
    assert suite.summary("1.2", {"z/x": rows}) == "| 1.2 | 1 | 0 | 2 | 0 | 1 | 0 | 1 | 0 |"


@pytest.mark.parametrize(
    ("ours", "again", "expected"),
    [
        (record("failed"), [record()] * suite.TRIES, suite.ALONE),
        (record("failed"), [record(bits=("b",))] * suite.TRIES, suite.ALONE),
        (record("failed"), [record(), record("failed")], suite.VARIES),
        (record("failed"), [{}], suite.VARIES),
        (record(bits=("c",)), [record()] * suite.TRIES, suite.OTHER),
        (record(bits=("c",)), [record(), record(bits=("b",))], suite.VARIES),
        (record(bits=("c",)), [record("failed")], suite.VARIES),
    ],
)
def test_what_the_plugin_fails_is_run_again_under_stock(monkeypatch, ours, again, expected):
    runs = iter([record(), ours, *again])

    def run(self, file, plugin=False, add=False, only=None):
        if only == []:
            return {}
        found = next(runs)
        return {"t": {**found, "why": ""}} if found else {}

    monkeypatch.setattr(suite.Suite, "run", run)
    judged = suite.Suite.__new__(suite.Suite).judge("file")
    assert [row[:3] for row in judged] == [["own", expected, "t"]]
    assert next(runs, None) is None


def test_a_test_that_expects_a_refusal_is_left_out(monkeypatch):
    name = f"f.py::{next(iter(suite.LEFT_OUT))}"
    asked = []

    def run(self, file, plugin=False, add=False, only=None):
        asked.append((plugin, only))
        return {} if only == [] else {name: {**record(), "why": ""}}

    monkeypatch.setattr(suite.Suite, "run", run)
    (row,) = suite.Suite.__new__(suite.Suite).judge("file")
    assert row == ["own", suite.LEFT, name, suite.LEFT_OUT[suite.name_of(name)]]
    assert [only for plugin, only in asked if plugin] == [[], []]


@pytest.mark.own_process  # a suite that ran it here would end the tests
@pytest.mark.parametrize("end", ["raise KeyboardInterrupt", "os.kill(os.getpid(), 15)"])
def test_a_file_that_was_stopped_is_not_recorded(tmp_path, monkeypatch, end):
    monkeypatch.setattr(suite, "HERE", tmp_path)  # its hook needs DeepSpeed's tests
    tests = tmp_path / "source" / "tests" / "unit"
    tests.mkdir(parents=True)
    (tests / "x.py").write_text(f"import os\ndef test_it():\n    {end}\n")
    (tests / "y.py").write_text("def test_it():\n    raise ValueError\n")
    (tests.parent / "suite_hook.py").touch()
    made = suite.Suite(tmp_path / "source", tmp_path / "work")
    with pytest.raises(SystemExit, match="pytest was stopped in x"):
        made.run("x")
    assert made.run("y") == {}
