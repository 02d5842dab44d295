"""Runs that ended well and whose files were cut since: what is left makes no speed-up."""

import json

import pytest
from programs import parse_logs as parse, report
from rows import rows

from parse.compare import compare_points
from parse.run import copies, label_runs, read_run, read_sweep

SLOW, FAST = (9.0, 0.4, 0.41, 0.42, 0.43), (9.0, 0.2, 0.205, 0.21, 0.215)
GPUS = {"provenance": {"gpus": [{"name": "Test GPU", "driver": "1"}]}}
LOSSES = (9.0, 8.5, 8.25, 8.125, 8.0)
OFF = (*LOSSES[:4], 8.0009)


@pytest.fixture
def pair(sweep_writer):
    """A folder of stock and stride on a GPU, ``ours`` and ``theirs`` with fields of their own."""
    sweep_writer.device = "Test GPU"

    def write(ours=(), theirs=(), **both):
        fields = {"point": {"iterations": 5}, **GPUS, **both}
        runs = [("stock", 0, {"seconds": SLOW, **fields, **dict(theirs)})]
        runs += [("stride", 2, {"seconds": FAST, **fields, **dict(ours)})]
        return sweep_writer.write_runs(runs)

    return write


def run_of(folder, engine):
    part = {"stock": "flush_async0", "stride": "prefetch1"}[engine]
    (path,) = folder.glob(f"*{part}*/run-001")
    return path


def edit_metrics(run, edit):
    """Let ``edit`` return the events that are to be there in place of those that are."""
    path = run / "metrics.jsonl"
    events = edit([json.loads(line) for line in path.read_text().splitlines()])
    path.write_text("".join(json.dumps(event) + "\n" for event in events))


def cut_log(run, iterations):
    (path,) = run.glob("*.log")
    lines = path.read_text().splitlines(keepends=True)
    ends = [number for number, line in enumerate(lines) if "consumed samples" in line]
    path.write_text("".join(lines[: ends[iterations - 1] + 1]))


def compared(folder):
    runs = read_sweep(folder)
    label_runs(runs)
    (item,) = compare_points(runs, 1)
    return item


def without_norms(events):
    lost = [{**event, "grad_norm": None} for event in events[2:-1]]
    return [*events[:2], *lost, events[-1]]


CUTS = {
    "2 of 5 iterations": lambda events: events[:3],
    "4 of 5 iterations": lambda events: [*events[:3], *events[4:]],
    "its end is missing": lambda events: events[:-1],
    "gradient norms of 1 of 5 iterations": without_norms,
}


@pytest.mark.parametrize("engine", ["stride", "stock"])
@pytest.mark.parametrize("gap", CUTS)
def test_metrics_that_were_cut_are_not_compared_by_what_is_left(pair, gap, engine):
    """Not by printed digits, which are close, nor without the final state."""
    folder = pair({"losses": OFF if gap == "2 of 5 iterations" else LOSSES})
    edit_metrics(run_of(folder, engine), CUTS[gap])
    item = compared(folder)
    whose = "stock's " if engine == "stock" else ""
    assert item.withheld == f"{whose}metrics.jsonl is incomplete: {gap}"
    assert item.equality == "not compared"
    assert item.speedup("iteration") is None
    assert [finding.holds for finding in item.findings] == [False]


def test_metrics_of_one_side_alone_are_a_gap(pair):
    folder = pair({"losses": OFF})
    (run_of(folder, "stride") / "metrics.jsonl").unlink()
    item = compared(folder)
    assert "metrics.jsonl is missing or does not fit the log" in item.withheld
    assert item.speedup("iteration") is None


def test_a_run_that_differs_is_said_to_differ_even_where_its_metrics_are_cut(pair):
    folder = pair({"losses": (*LOSSES[:4], 7.0)})
    edit_metrics(run_of(folder, "stride"), CUTS["its end is missing"])
    item = compared(folder)
    assert item.equality == "differs"
    assert "the pair differs from iteration 5" in item.withheld
    assert "metrics.jsonl is incomplete: its end is missing" in item.withheld


def no_norms(events):
    return [{**event, "grad_norm": None} for event in events]


def norm_of_a_skipped_update(events):
    return [{**e, **({"grad_norm": None, "skipped": True} if e.get("iteration") == 2 else {})}
            for e in events]  # fmt: skip


def from_checkpoint(events):
    return [event for event in events if event.get("iteration", 9) > 2]


@pytest.mark.parametrize("edit", [no_norms, norm_of_a_skipped_update])
@pytest.mark.parametrize("engines", [("stride",), ("stock", "stride")])
def test_norms_that_no_engine_gives_or_no_update_has_are_no_gap(pair, edit, engines):
    folder = pair()
    for engine in engines:
        edit_metrics(run_of(folder, engine), edit)
    item = compared(folder)
    assert (item.equality, item.withheld) == ("equal", "")
    assert item.speedup("iteration") == pytest.approx(2.0)


def test_runs_that_went_on_from_a_checkpoint_are_whole(pair):
    folder = pair()
    for engine in ("stock", "stride"):
        run = run_of(folder, engine)
        edit_metrics(run, from_checkpoint)
        (path,) = run.glob("*.log")
        lines = path.read_text().splitlines(keepends=True)
        ends = [number for number, line in enumerate(lines) if "consumed samples" in line]
        path.write_text("".join([lines[0], *lines[ends[1] + 1 :]]))
    item = compared(folder)
    assert (item.equality, item.withheld) == ("equal", "")


def test_a_trainer_that_ended_before_its_last_iteration_says_so_at_its_end(pair):
    item = compared(pair(point={"iterations": 9}))
    assert (item.equality, item.withheld) == ("equal", "")


@pytest.mark.parametrize("status", ["ok", ""])
@pytest.mark.parametrize("engine", ["stride", "stock"])
def test_a_run_whose_last_iterations_are_gone_has_no_verdict(pair, engine, status):
    folder = pair({"status": status}, {"status": status})
    run = run_of(folder, engine)
    cut_log(run, 3)
    edit_metrics(run, lambda events: events[:4])
    item = compared(folder)
    who = {"stride": "run", "stock": "stock run"}[engine]
    assert item.withheld == f"{who} incomplete (3 of 5 iterations are there)"
    assert item.equality == "not compared"
    assert item.speedup("iteration") is None
    assert not item.ours.finished or engine == "stock"
    assert report([str(folder)]) == 1
    status_of = {row["engine"]: row["status"] for row in rows(folder / "tables" / "runs.csv")}
    assert status_of[engine] == "incomplete"
    text = (folder / "report.md").read_text()
    assert "0 of 1 points beside stock pass the gate" in text
    assert "3 of 5 iterations are there" in text


def test_an_end_that_names_more_iterations_than_there_are_is_told(pair):
    folder = pair()
    run = run_of(folder, "stride")
    cut_log(run, 3)
    edit_metrics(run, lambda events: [*events[:4], events[-1]])
    assert compared(folder).withheld == "run incomplete (3 of 5 iterations are there)"


def test_a_run_that_did_not_end_well_keeps_its_own_word(pair):
    folder = pair({"status": "timeout", "cause": "10 s"})
    run = run_of(folder, "stride")
    cut_log(run, 3)
    edit_metrics(run, lambda events: events[:4])
    assert compared(folder).withheld == "run timeout (10 s)"


# One log twice


def test_a_log_that_is_read_twice_is_no_repeat(write_log, tmp_path, capsys):
    name = "log-7B-tp1-dp1-l2-h4-a2-sl64-gbs2-mbs1-ratio1-subg100-prefetch{}-flush_async{}.log"
    for folder in ("x", "y"):
        for on, seconds in ((0, SLOW), (1, FAST)):
            write_log(f"logs/{folder}/{name.format(on, on)}", seconds=seconds)
    assert parse([str(tmp_path / "logs"), "--out", str(tmp_path / "out")]) == 0
    first = rows(tmp_path / "out" / "comparisons.csv")[0]
    assert (first["repeats"], first["reference_repeats"]) == ("1", "1")
    assert first["interval_covers"] == "inside a run"
    assert len(rows(tmp_path / "out" / "runs.csv")) == 2
    logs = tmp_path / "logs"
    said = [line for line in capsys.readouterr().err.splitlines() if "read once" in line]
    assert said == [
        f"parse: {logs / 'y' / one}: says the same as {logs / 'x' / one}; read once"
        for one in (name.format(0, 0), name.format(1, 1))
    ]


def test_a_copied_run_is_reported_once_and_told(pair):
    folder = pair()
    run = run_of(folder, "stride")
    copy = run.with_name("run-002")
    copy.mkdir()
    for path in run.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    index = json.loads((folder / "sweep.json").read_text())
    index["runs"].append({**index["runs"][1], "run_dir": f"{run.parent.name}/run-002"})
    (folder / "sweep.json").write_text(json.dumps(index))
    assert report([str(folder)]) == 0
    first = rows(folder / "tables" / "comparisons.csv")[0]
    assert (first["repeats"], first["interval_covers"]) == ("1", "inside a run")
    assert "says the same; read once" in (folder / "report.md").read_text()


def test_runs_that_failed_with_the_same_words_are_two_runs(write_log):
    logs = [write_log(f"{at}/log.log", losses=()) for at in ("a", "b")]
    runs = [read_run(path) for path in logs]
    assert runs[0].log.digest == runs[1].log.digest
    label_runs(runs)
    assert copies(runs) == []
