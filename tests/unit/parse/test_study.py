"""Tables and report of a study that the code has never heard of."""

import json
import shutil

import pytest
from programs import parse_logs as main, report
from rows import rows

from configs.study import study_from

STUDY = {
    "name": "paint",
    "title": "How paint dries",
    "source": "a shelf",
    "reference": "oil",
    "gate": {"kind": "close", "tolerance": 0.01},
    "phases": {
        "forward": {"title": "forward", "colour": "#000000"},
        "dry": {"title": "drying", "colour": "#ffffff"},
    },
    "fields": {
        "coats": {"title": "coats", "in_pairs": "prefer", "default": 1},
        "wet": {"title": "wet", "type": "bool", "default": False},
        "thinner": {"title": "thinner", "type": "float", "default": 0.0, "only_some_engines": True},
    },
    "engines": {
        "acrylic": {
            "title": "Acrylic", "fields": {"thinner": {}}, "ends_update": "wet",
        },
        "oil": {"title": "Oil"},
    },
    "figures": {
        "drying": {"kind": "swept", "title": "How long it takes", "x": "coats", "y": ["dry_ms"]},
    },
}  # fmt: skip


@pytest.fixture
def painted(sweep_writer):
    """A sweep of the study; ``ours`` is more of the second engine's point."""
    sweep_writer.device = "Test GPU"

    def write(**ours):
        same = {"measured": {"dry_ms": 5.0}, "repeat": 1}
        own = {"coats": 2, "wet": False}
        runs = [("oil", 0, {**same, "point": {**own, "thinner": 0.0}})]
        runs += [("acrylic", 0, {**same, "point": {**own, "thinner": 0.5, **ours}})]
        runs[1][2].update(evaluations=[(2, 4.0), (4, 3.5)], stalls=[(2, 3.0), (4, 5.0), (5, 90.0)])
        return sweep_writer.write_runs(runs, study=STUDY, figures=["drying"])

    return write


def test_columns_names_phases_and_pairs_are_the_studys(painted):
    folder = painted()
    assert report([str(folder)]) == 0
    out = folder / "tables"
    oil, acrylic = rows(out / "runs.csv")
    assert (oil["coats"], oil["wet"], acrylic["thinner"]) == ("2", "0", "0.5")
    assert (acrylic["dry_ms"], acrylic["dry_median_ms"], acrylic["forward_ms"]) == (
        "5.0", "5.0", "12.75",
    )  # fmt: skip
    assert "stride" not in oil
    assert "update_median_ms" not in oil
    assert [oil["label"], acrylic["label"]] == ["tiny oil", "tiny acrylic thinner 0.5"]
    found = rows(out / "comparisons.csv")
    assert [row["phase"] for row in found] == ["iteration", "forward", "dry"]
    first = found[0]
    assert (first["engine"], first["thinner"], first["coats"]) == ("acrylic", "0.5", "2")
    assert "wet" not in first
    assert (first["reference"], first["reference_label"]) == ("oil", "tiny oil")
    assert (first["gate"], first["equality"], first["ratio"]) == ("close", "equal", "1.0")
    assert first["verdict"].startswith("equal to oil (")
    travelled = study_from(json.loads((out / "study.json").read_text()), "it")
    assert (travelled.name, travelled.reference) == ("paint", "oil")


def test_evaluations_and_stalls_are_columns(painted, tmp_path):
    main([str(painted()), "--out", str(tmp_path)])
    assert [row["checkpoint_stall_ms"] for row in rows(tmp_path / "runs.csv")] == ["", "5.0"]
    # Iteration i takes 100 + 12.3 (i - 1) ms, and nothing comes after the last checkpoint.
    lost = [row["checkpoint_lost_ms"] for row in rows(tmp_path / "runs.csv")]
    assert lost[0] == ""
    assert float(lost[1]) == pytest.approx(41.04, abs=0.01)
    assert [row["validation_loss"] for row in rows(tmp_path / "runs.csv")] == ["", "3.5"]
    losses = [row["validation_loss"] for row in rows(tmp_path / "iterations.csv")]
    assert losses == [*[""] * 5, "", "4.0", "", "3.5", ""]
    assert {row["validation_perplexity"] for row in rows(tmp_path / "runs.csv")} == {"", "2.0"}


def test_a_field_that_should_agree_withholds_and_one_that_must_leaves_no_pair(painted, tmp_path):
    main([str(painted(coats=3)), "--out", str(tmp_path / "a")])
    reasons = rows(tmp_path / "a" / "comparisons.csv")[0]["withheld"]
    assert reasons == "oil has another coats (2 for 3)"
    shutil.rmtree(tmp_path / "a sweep")
    main([str(painted(wet=True)), "--out", str(tmp_path / "b")])
    row = rows(tmp_path / "b" / "comparisons.csv")[0]
    assert (row["withheld"], row["reference_label"]) == ("no oil run of this point", "")


def test_phases_of_an_update_that_does_not_end_are_nobodys(painted, tmp_path):
    main([str(painted(wet=True)), "--out", str(tmp_path)])
    oil, acrylic = rows(tmp_path / "runs.csv")
    cells = [(row["forward_ms"], row["dry_ms"], row["dry_median_ms"]) for row in (oil, acrylic)]
    assert cells == [("12.75", "5.0", "5.0"), ("", "", "")]
    assert acrylic["iteration_ms"] == oil["iteration_ms"] != ""


def test_runs_of_two_studies_and_of_a_damaged_one_are_one_line(
    painted, sweep_writer, tmp_path, capsys
):
    folder = painted()
    sweep_writer.folder = tmp_path / "other"
    other = sweep_writer.write_runs([("oil", 0, {})], study={**STUDY, "name": "ink"})
    for run, study in ((folder, STUDY), (other, {**STUDY, "name": "ink"})):
        for path in run.rglob("run.json"):
            path.write_text(json.dumps({**json.loads(path.read_text()), "study": study}))
    assert main([str(folder), str(other), "--out", str(tmp_path / "t")]) == 2
    assert "runs of the studies ink, paint: parse each" in capsys.readouterr().err
    for path in other.rglob("run.json"):
        path.write_text(json.dumps({**json.loads(path.read_text()), "study": {"name": "x"}}))
    assert main([str(other), "--out", str(tmp_path / "t")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "not a study; parse it with the version that ran it" in error
