"""Engines that must equal another engine bit for bit, whatever their study's gate asks for."""

import json

import pytest
from programs import report as main
from rows import rows

from parse.report import parse_sweep

STUDY = {
    "name": "twins",
    "title": "Twins",
    "reference": "far",
    "gate": {"kind": "quality", "metric": "error", "margin": 0.5, "seeds": 2},
    "results": {"error": "what went wrong", "epoch_s": "time of an epoch"},
    "phases": {"forward": {"title": "forward", "colour": "#000000"}},
    "engines": {
        "far": {"title": "Far"},
        "one": {"title": "One"},
        "other": {"title": "Other", "equals": "one"},
    },
}
LOSSES = (9.0, 8.5, 8.25)


@pytest.fixture
def twins(sweep_writer, capsys):
    """``twins(other={...})`` -> the findings of a sweep whose engines differ as is said."""

    found = {}

    def write(**changed):
        runs = []
        for seed in (1, 2):
            for engine in STUDY["engines"]:
                same = {"losses": LOSSES, "norms": (1.0, 2.0, 3.0), "digest": "aa"}
                fields = {**same, "point": {"seed": seed}, "repeat": 1}
                # What engines are held against may train otherwise.
                if engine == "far":
                    fields |= {"losses": (9.0, 8.0, 7.0), "digest": "bb"}
                fields |= changed.get(engine, {}) if seed == 2 else {}
                runs.append((engine, 0, fields))
        folder = sweep_writer.write_runs(runs, study=STUDY, figures=[])
        for path in folder.rglob("metrics.jsonl"):
            *lines, end = path.read_text().splitlines()
            end = {**json.loads(end), "error": 0.25, "epoch_s": 3.5}
            path.write_text("\n".join([*lines, json.dumps(end)]) + "\n")
        found["all hold"] = main([str(folder)]) == 0
        found["lines"] = capsys.readouterr().out.splitlines()
        found["tables"] = folder / "tables"
        return found

    return write


def of_twins(findings):
    return [line for line in findings["lines"] if "one" in line.partition(":")[2]]


def test_equal_twins_hold_beside_a_gate_of_another_kind(twins):
    found = twins()
    assert found["all hold"], found["lines"]
    assert len(of_twins(found)) == 2
    for line in of_twins(found):
        assert "equal to one (3 losses, 3 gradient norms, weights and optimizer state)" in line
    table = rows(found["tables"] / "comparisons.csv")
    assert {row["gate"] for row in table if row["engine"] == "other"} == {"quality"}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"losses": (9.0, 8.5, 8.2500001)}, "only close to one"),
        ({"losses": (9.0, 8.5, 1.0)}, "differs from one"),
        ({"norms": (1.0, 2.0, 3.0000001)}, "only close to one"),
        ({"digest": "cc"}, "differs from one: the losses agree, the final weights"),
    ],
)
def test_a_twin_that_differs_in_one_seed_fails_and_allows_no_speed_up(twins, changed, words):
    found = twins(other=changed)
    assert not found["all hold"]
    assert [words in line for line in of_twins(found)] == [False, True]
    own = [r for r in rows(found["tables"] / "comparisons.csv") if r["engine"] == "other"]
    assert all(words in row["withheld"] and not row["speedup"] for row in own)


def test_a_run_that_failed_or_has_no_twin_was_not_compared(twins):
    found = twins(other={"status": "oom-host"})
    assert "not compared with one: run oom-host" in of_twins(found)[1]
    assert not found["all hold"]


def test_a_twin_whose_metrics_were_cut_is_not_known_to_be_equal(twins):
    folder = twins()["tables"].parent
    (path, _) = sorted(folder.glob("*-engine_other*/run-001/metrics.jsonl"))
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    parsed = parse_sweep(folder)
    assert not parsed.all_hold
    said = [finding.verdict for finding in parsed.findings if " one" in finding.verdict]
    assert len(said) == 2
    assert said[0] == "not compared with one: metrics.jsonl is incomplete: its end is missing"


def test_a_twin_that_did_not_finish_is_none(twins):
    found = twins(one={"status": "failed"})
    assert any("not compared with one: no finished run of it with seed 2" in line
               for line in of_twins(found))  # fmt: skip
    assert not found["all hold"]


def test_the_studys_results_are_columns_of_its_runs(twins):
    table = rows(twins()["tables"] / "runs.csv")
    assert {(row["error"], row["epoch_s"]) for row in table} == {("0.25", "3.5")}
