"""JSON that trainers write beside their logs."""

import json
import math
from datetime import timedelta

import pytest

from parse.__main__ import main
from parse.diagnose import diagnose
from parse.log import read_log, read_usable_log
from parse.run import label_runs, read_run
from parse.verdict import judge_log

LOSSES = [2.5, 2.25, 2.125, 2.0, 1.75, 1.5, 1.25]


def state(losses=LOSSES, norms=(), every=10, **more):
    history = []
    for index, loss in enumerate(losses):
        entry = {"epoch": 0.1 * index, "learning_rate": 1e-05, "loss": loss}
        entry |= {"grad_norm": norms[index]} if norms else {}
        history += [entry | {"step": every * (index + 1)}]
    history.insert(2, {"epoch": 0.2, "eval_loss": 9.5, "eval_runtime": 1.5, "step": 2 * every})
    history.append({"train_loss": 2.0, "train_runtime": 60.5, "step": every * len(losses)})
    return {"best_metric": None, "global_step": 70, "log_history": history, "max_steps": 70, **more}


def progress(first=0, seconds=15, every=10, **more):
    return [
        {"current_steps": every * (first + i + 1), "total_steps": 70, "loss": loss, "lr": 5e-05,
         "epoch": 0.1, "percentage": 1.0, "elapsed_time": str(timedelta(seconds=(i + 1) * seconds)),
         "remaining_time": "0:01:00", "total_tokens": 1000 * (i + 1), **more}
        for i, loss in enumerate(LOSSES[first:])
    ]  # fmt: skip


def as_lines(objects):
    return "".join(json.dumps(one) + "\n" for one in objects)


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("name", ["trainer_state.json", "renamed.log"])
def test_the_history_of_a_trainers_state_is_read(write_log, indent, name):
    text = json.dumps(state(norms=[1.5] * 7), indent=indent, sort_keys=True) + "\n"
    path = write_log(name, text=text)
    log = read_usable_log(path)
    assert [(r.iteration, r.loss) for r in log.iterations] == [
        (10 * (i + 1), loss) for i, loss in enumerate(LOSSES)
    ]
    assert log.iterations[0].printed == {"grad_norm": 1.5, "learning_rate": 1e-05}
    assert {r.iteration_s for r in log.iterations} == {None}
    assert (log.rejects, log.notes, log.ends_mid_line) == ([], [], False)
    found = diagnose(path)
    assert (found.num_steps, found.software) == (7, ["Hugging Face Trainer"])
    assert found.illnesses == []


def test_an_illness_in_a_state_is_named_with_its_line_in_the_file(write_log):
    losses, norms = [*LOSSES, *[0.0] * 8], [1.5] * 7 + [math.nan] * 8
    text = json.dumps(state(losses, norms), indent=2)
    found = diagnose(write_log("trainer_state.json", text=text))
    first = text.splitlines().index('      "grad_norm": NaN,') - 3
    assert text.splitlines()[first - 1].strip() == "{"
    assert {illness.line for illness in found.illnesses if illness.name == "norm-nan"} == {first}


@pytest.mark.parametrize("cut", [1, 40, 4000])
def test_a_state_that_is_cut_off_gives_the_steps_before(write_log, cut):
    text = json.dumps(state([2.5 - 0.001 * i for i in range(200)]), indent=2)
    at = text.index('"learning_rate"', cut)
    log = read_log(write_log("trainer_state.json", text=text[:at]))
    whole = text[:at].count("},")
    assert len(log.iterations) == whole - (whole > 2)
    assert [(r.line, r.reason) for r in log.rejects] == [
        (text[: text[:at].rindex("{")].count("\n") + 1, "cut off")
    ]
    assert log.ends_mid_line


def test_times_come_from_what_had_passed_where_that_is_fine_enough(write_log):
    log = read_log(write_log("trainer_log.jsonl", text=as_lines(progress(vram_allocated=12.5))))
    assert [r.iteration_s for r in log.iterations] == [1.5] * 7
    assert log.iterations[-1].printed == {"learning_rate": 5e-05, "tokens": 7000}
    assert log.iterations[0].device_memory_gib == 12.5
    log = read_log(write_log("trainer_log.jsonl", text=as_lines(progress(seconds=9))))
    assert {r.iteration_s for r in log.iterations} == {None}
    days = progress()[:1]
    days[0]["elapsed_time"] = "2 days, 1:00:00"
    (record,) = read_log(write_log("trainer_log.jsonl", text=as_lines(days))).iterations
    assert record.iteration_s == 49 * 360


@pytest.mark.parametrize(
    ("last", "word"),
    [([0.9] * 13, "trains"), ([0.9] * 20, "frozen"), ([0.9512] * 7, "trains"),
     ([0.9512] * 8, "frozen"), ([1.1234567] * 3, "frozen"), ([0.0] * 8, "frozen"),
     ([0.04, 0.0, 0.0, 0.0], "trains")],
)  # fmt: skip
def test_equal_losses_of_few_digits_may_be_a_coincidence(write_log, last, word):
    losses = [2.5123, 2.2512, 2.1251, 2.0123, 1.7512, 1.5123, 1.2512, *last]
    path = write_log("trainer_state.json", text=json.dumps(state(losses)))
    assert judge_log(read_log(path)).word == word
    assert [one.name for one in diagnose(path).illnesses] == ["loss-frozen"] * (word == "frozen")


@pytest.mark.parametrize("first", [0, 3])
def test_a_run_that_was_begun_anew_or_went_on_replaces_what_came_after(write_log, first):
    again = progress(first)
    for entry in again:
        entry["loss"] += 0.5
    log = read_log(write_log("trainer_log.jsonl", text=as_lines(progress() + again)))
    wanted = LOSSES[:first] + [loss + 0.5 for loss in LOSSES[first:]]
    assert [r.loss for r in log.iterations] == wanted
    assert [r.iteration for r in log.iterations] == list(range(10, 71, 10))
    assert [note for note in log.notes if "goes back to step" in note]
    # The first time after it began anew is not known where it went on from a checkpoint.
    assert [r.iteration_s for r in log.iterations][first + 1 :] == [1.5] * (6 - first)


def test_what_cannot_be_read_is_left_out_and_told(write_log, capsys, tmp_path):
    lines = [json.dumps(one) for one in progress()]
    lines[2] = lines[2].replace("2.125", "NaN")
    lines[3:3] = ["[INFO] saving a checkpoint", "", '{"current_steps": 35, "loss": ']
    lines[-1] = lines[-1][:50]
    path = write_log("trainer_log.jsonl", text="\ufeff" + "\r\n".join(lines))
    log = read_log(path)
    assert [r.iteration for r in log.iterations] == list(range(10, 61, 10))
    assert math.isnan(log.iterations[2].loss)
    assert [(r.line, r.reason) for r in log.rejects] == [
        (4, "no JSON object"), (6, "no JSON object"), (10, "cut off"),
    ]  # fmt: skip
    main([str(path), "--out", str(tmp_path / "out")])
    assert "line 4 left out: no JSON object" in capsys.readouterr().err
    found = diagnose(path)
    assert "3 lines that are no JSON, from line 4 on" in found.not_judged


def test_a_last_line_without_an_end_is_whole_if_its_object_is(write_log):
    log = read_log(write_log("trainer_log.jsonl", text=as_lines(progress()).rstrip("\n")))
    assert (len(log.iterations), log.rejects, log.ends_mid_line) == (7, [], False)


@pytest.mark.parametrize(
    "entry",
    [
        {"global_step/max_steps": "30/100", "loss": 2.5, "learning_rate": 1e-4},
        {"step": "30", "loss": "2.5"},
        {"global_step": 30.0, "loss": 2.5},
    ],
)
def test_steps_of_other_programs_are_read(write_log, entry):
    (record,) = read_log(write_log(text=json.dumps(entry) + "\n")).iterations
    assert (record.iteration, record.loss) == (30, 2.5)


@pytest.mark.parametrize(
    "entry",
    [
        {"step": 3, "skipped": 1},
        {"step": "three", "loss": 1.0},
        {"step": 1.5, "loss": 1.0},
        {"step": None, "loss": 1.0},
        {"event": "iteration", "iteration": 1, "loss": 1.0},
        {"current_steps": 3, "loss": None, "eval_loss": 1.0},
    ],
)
def test_other_objects_are_no_steps(write_log, entry):
    assert read_log(write_log(text=json.dumps(entry) + "\n")).iterations == []


def test_a_line_of_json_in_a_log_makes_its_other_lines_no_damage(write_log):
    text = 'building\n{"step": 1, "loss": 2.5}\ndone with it\n'
    assert read_log(write_log(text=text)).rejects == []


def test_trainers_files_make_tables(write_log, tmp_path):
    runs = [
        read_run(write_log("a/trainer_state.json", text=json.dumps(state()))),
        read_run(write_log("b/trainer_log.jsonl", text=as_lines(progress()))),
    ]
    label_runs(runs)
    assert len({run.label for run in runs}) == 2
    assert main([str(run.log.path) for run in runs] + ["--out", str(tmp_path / "out")]) == 0
    rows = (tmp_path / "out" / "iterations.csv").read_text().splitlines()
    assert len(rows) == 1 + 2 * len(LOSSES)
