"""What each gate lets pass, and what it withholds with the reason in words."""

import json
import math

import pytest
from programs import report

from configs.study import Gate, default_study
from parse.compare import compare_points, judge_seeds
from parse.run import label_runs, read_sweep

SLOW, FAST = (9.0, 0.4, 0.41, 0.42, 0.43), (9.0, 0.2, 0.205, 0.21, 0.215)
GPUS = {"provenance": {"gpus": [{"name": "Test GPU", "driver": "1"}]}}
LOSSES = (9.0, 8.5, 8.25, 8.125, 8.0)
QUALITY = {"kind": "quality", "margin": 0.05, "seeds": 3}


def study_with(gate):
    return {**json.loads(default_study().as_json()), "gate": gate}


@pytest.fixture
def gated(sweep_writer):
    """Writes a sweep of the gate's study: ``ours`` and ``theirs`` give the fields of each run."""
    sweep_writer.device = "Test GPU"

    def write(gate, ours, theirs=({},)):
        runs = [("stock", 0, {"seconds": SLOW, **GPUS, **fields}) for fields in theirs]
        runs += [("stride", 2, {"seconds": FAST, **GPUS, **fields}) for fields in ours]
        folder = sweep_writer.write_runs(runs, study=study_with(gate))
        found = read_sweep(folder)
        label_runs(found)
        (item,) = compare_points(found, 1)
        return item, folder

    return write


def seeds(values, **fields):
    return [
        {"point": {"seed": seed}, "repeat": 1, "evaluations": [(2, 99.0), (5, value)], **fields}
        if value is not None
        else {"point": {"seed": seed}, "repeat": 1, **fields}
        for seed, value in enumerate(values, start=1)
    ]


# bitwise


@pytest.mark.parametrize("exact", [True, False])
def test_a_row_that_is_not_expected_to_be_equal_may_differ_and_gets_no_speed_up(
    sweep_writer, exact
):
    sweep_writer.device = "Test GPU"
    study = study_with({"kind": "bitwise"})
    study["engines"]["stride"]["exact"] = exact
    runs = [("stock", 0, {"seconds": SLOW, **GPUS})]
    runs += [("stride", 2, {"seconds": FAST, "losses": (*LOSSES[:4], 8.01), **GPUS})]
    found = read_sweep(sweep_writer.write_runs(runs, study=study))
    label_runs(found)
    (item,) = compare_points(found, 1)
    assert [finding.holds for finding in item.findings] == [not exact]
    assert item.speedup("iteration") is None
    assert "the pair differs from iteration 5" in item.withheld


@pytest.mark.parametrize(
    ("ours", "word", "reason"),
    [
        ({}, "equal", ""),
        ({"losses": (*LOSSES[:4], 8.0005)}, "close", "the pair is only close (5 losses, largest"),
        ({"norms": [0.5, 0.5, 0.5, 0.5, 0.25]}, "close", "gradient norms differ by up to 0.5"),
        ({"losses": (*LOSSES[:4], 8.01)}, "differs", "the pair differs from iteration 5"),
        ({"digest": "bb"}, "differs", "the final weights and optimizer state do not"),
    ],
)
def test_bitwise_lets_pass_what_is_equal(gated, ours, word, reason):
    item, _ = gated({"kind": "bitwise"}, [ours])
    assert item.equality == word
    assert reason in item.withheld
    assert bool(item.withheld) == bool(reason)
    assert (item.speedup("iteration") is None) == bool(reason)


def test_bitwise_takes_printed_digits_where_the_runs_kept_no_others(gated, sweep_writer):
    item, folder = gated({"kind": "bitwise"}, [{"losses": (*LOSSES[:4], 8.0005)}])
    for path in folder.rglob("metrics.jsonl"):
        path.unlink()
    runs = read_sweep(folder)
    label_runs(runs)
    (item,) = compare_points(runs, 1)
    assert (item.equality, item.withheld) == ("close", "")
    assert item.speedup("iteration") == pytest.approx(2.0)


# close


@pytest.mark.parametrize(
    ("gate", "ours", "word", "reason"),
    [
        ({}, {"losses": (*LOSSES[:4], 8.009), "digest": "bb"}, "close", ""),
        ({}, {}, "equal", ""),
        ({}, {"losses": (*LOSSES[:4], 8.02)}, "differs",
         "the pair differs: largest difference of loss 0.02 at iteration 5 of 5, tolerance 0.01"),
        ({}, {"losses": (9.0, 8.5, math.nan, 8.125, 8.0)}, "differs", "is nan from iteration 3"),
        ({"quantity": "grad_norm"}, {"losses": (9.0, 8.0, 7.0, 6.0, 5.0)}, "equal", ""),
        ({"quantity": "grad_norm"}, {"norms": [0.5, 0.5, 0.52, 0.5, 0.5]}, "differs",
         "largest difference of grad_norm 0.02 at iteration 3 of 5"),
        ({"quantity": "grad_norm"}, {"norms": [0.5, 0.5, None, 0.5, 0.5]}, "not compared",
         "1 of 5 iterations lack a grad_norm"),
    ],
)  # fmt: skip
def test_close_lets_pass_what_is_within_its_tolerance(gated, gate, ours, word, reason):
    item, _ = gated({"kind": "close", "tolerance": 0.01, **gate}, [ours])
    assert item.equality == word
    assert reason in item.withheld
    assert bool(item.withheld) == bool(reason)
    assert (item.speedup("iteration") is None) == bool(reason)


def test_close_holds_a_run_against_the_reference_of_its_own_seed(gated):
    other = (9.5, 9.0, 8.75, 8.5, 8.25)
    sides = [[{"point": {"seed": 1}}, {"point": {"seed": 2}, "losses": other}] for _ in "ab"]
    item, _ = gated({"kind": "close", "tolerance": 0.01}, *sides)
    assert (item.equality, item.withheld, len(item.pairs)) == ("equal", "", 2)
    assert item.ours.label == "tiny stride 2"


def test_close_compares_no_runs_of_different_seeds(gated):
    gate = {"kind": "close", "tolerance": 0.01}
    item, _ = gated(gate, [{"point": {"seed": 1}}], [{"point": {"seed": 3}}])
    assert item.equality == "not compared"
    assert item.withheld == "no stock run of this point"


def test_close_names_gate_and_reference_and_decides_the_exit_code(gated, capsys):
    gate = {"kind": "close", "tolerance": 0.01}
    _, folder = gated(gate, [{"losses": (*LOSSES[:4], 8.009)}])
    assert report([str(folder)]) == 0
    line = "tiny stride 2: close to stock (largest difference of loss 0.009 at iteration 5"
    assert f"{line} of 5, tolerance 0.01); gate close passed\n" in capsys.readouterr().out
    text = (folder / "report.md").read_text()
    assert "The gate close lets a speed-up pass where a run is\nloss within 0.01" in text
    assert "speed-up 2.000x" in text
    assert "is bitwise" not in text


# quality


def test_quality_lets_pass_an_interval_below_the_margin(gated, capsys):
    ours, theirs = seeds((3.01, 3.02, 3.0)), seeds((3.0, 3.01, 3.02))
    item, folder = gated(QUALITY, ours, theirs)
    assert (item.equality, item.withheld) == ("close", "")
    assert item.ours.label == "tiny stride 2"
    assert item.speedup("iteration") == pytest.approx(2.0)
    assert report([str(folder)]) == 0
    line = capsys.readouterr().out.splitlines()[0]
    assert line.startswith("tiny stride 2: as good as stock (mean validation_loss 3.01 ")
    assert line.endswith("margin 0.05); gate quality passed")


@pytest.mark.parametrize(
    ("ours", "theirs", "word", "reason"),
    [
        ((3.0, 3.01), (3.0, 3.01, 3.02), "not compared", "2 seeds of both the run and stock"),
        ((3.0, 3.01, 3.02), (3.0,), "not compared", "1 seeds of both the run and stock"),
        ((3.0, 3.2, 2.8), (3.0, 3.01, 3.02), "undecided", "the interval reaches the margin: mean"),
        ((3.5, 3.51, 3.49), (3.0, 3.01, 3.02), "differs", "worse: mean validation_loss 3.5"),
        ((3.0, None, 3.0), (3.0, 3.01, 3.02), "not compared",
         "validation_loss of the run is missing or no number, seed 2"),
    ],
)  # fmt: skip
def test_quality_withholds_with_its_reason(gated, capsys, ours, theirs, word, reason):
    item, folder = gated(QUALITY, seeds(ours), seeds(theirs))
    assert item.equality == word
    assert reason in item.withheld
    assert item.speedup("iteration") is None
    assert report([str(folder)]) == 1
    assert "x (95%" not in (folder / "report.md").read_text()


def test_quality_withholds_when_a_seed_did_not_finish(gated):
    ours = seeds((3.0, 3.01, 3.02, 3.0))
    ours[3] |= {"status": "failed", "cause": "boom"}
    item, _ = gated(QUALITY, ours, seeds((3.0, 3.01, 3.02, 3.0)))
    assert "run failed (boom)" in item.withheld
    assert not item.findings[0].holds


def test_repeats_of_a_seed_are_no_more_seeds():
    gate = Gate(**QUALITY)
    found = judge_seeds(gate, "r", {1: [3.0], 2: [3.0], 3: [3.0]}, {1: [3.0, 3.0, 3.0]})
    assert (found.word, found.passes) == ("", False)


def test_the_interval_of_the_same_seeds_is_that_of_their_differences():
    gate = Gate(**QUALITY)
    theirs = {1: [2.0], 2: [3.0], 3: [4.0], 9: [0.0]}
    # By hand: differences 0.01, 0.02 and 0.03, standard error 0.00577, Student's t of 2 is 4.303.
    found = judge_seeds(gate, "r", theirs, {3: [4.03], 1: [2.01], 2: [3.02]})
    assert "against 3 over the same, difference +0.02" in found.text
    assert "95% interval -0.00484 to +0.0448" in found.text
    assert found.passes
    found = judge_seeds(gate, "r", theirs, {1: [2.08], 2: [3.09], 3: [4.1]})
    assert found.word == "differs"


def test_one_diverged_seed_fails_the_point(gated):
    values = (2.0, 2.01, 1.99)
    ours = seeds(values)
    ours[1]["losses"] = (9.0, 9.5, 10.0, 10.5, 11.0, 11.5)
    ours[1]["seconds"] = (9.0, 0.2, 0.205, 0.21, 0.215, 0.2075)
    item, _ = gated(QUALITY, ours, seeds(values))
    (finding,) = item.findings
    assert not finding.holds
    assert "loss: diverged" in finding.verdict
    assert "the loss of stride is diverged" in item.withheld
