"""Which iteration figures are of, where lines are damaged or lost."""

from pathlib import Path

import pytest

from parse.log.read import read_log

FORMS = Path(__file__).resolve().parents[3] / "golden" / "parse" / "forms"


@pytest.fixture
def read(tmp_path):
    def read(lines):
        path = tmp_path / "log.log"
        path.write_bytes("".join(f"{line}\n" for line in lines).encode())
        return read_log(path)

    return read


def form(name):
    return (FORMS / f"{name}.log").read_bytes().decode().replace("\r", "\n").splitlines()


def numbers(log):
    return [record.iteration for record in log.iterations]


def updates(log):
    known = ((record.iteration, record.update_ms) for record in log.iterations)
    return {number: value for number, value in known if value is not None}


OLD = form("deepspeed_old")
OLD_UPDATES = {1: 40.02, 2: 40.03, 3: 40.04, 4: 40.05}


def without(lines, *parts):
    return [line for line in lines if not any(part in line for part in parts)]


@pytest.mark.parametrize(
    "lost",
    [
        [],
        ["step=2,"],
        ["step=1,", "step=3,"],
        ["step=3,", "step=4,"],
        ["step=1,", "step=2,", "step=3,", "step=4,"],
        ["optimizer_step"],
    ],
)
def test_timers_alone_are_numbered_by_what_is_left_of_the_progress(read, lost):
    assert updates(read(without(OLD, *lost))) == OLD_UPDATES


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("step=4,", "step=9,"),
        ("step=2,", "step=9,"),
        ("step=1,", "step=0,"),
        ("step=3,", "step=2,"),
    ],
)
def test_a_damaged_step_moves_no_timers(read, old, new):
    assert updates(read([line.replace(f" {old}", f" {new}") for line in OLD])) == OLD_UPDATES


@pytest.mark.parametrize("number", [1, 2, 3, 4])
@pytest.mark.parametrize("more", [[], ["step"], ["optimizer_step"], ["optimizer_step", "step"]])
@pytest.mark.parametrize("tags", [True, False])
def test_lost_timers_leave_a_gap(read, number, more, tags):
    update = f"step: {OLD_UPDATES[number]:.2f}"
    lost = {"step": f" step={number},", "optimizer_step": f"optimizer_step: 38.0{number}"}
    lines = OLD if tags else without(OLD, " step=")
    found = updates(read(without(lines, update, *(lost[name] for name in more))))
    assert number not in found
    assert found.items() <= OLD_UPDATES.items()


def test_two_words_for_a_step_must_agree(read):
    new = form("deepspeed_0_19")
    for old, damaged in (("global_step=2,", "global_step=7,"), (" step=2,", " step=7,")):
        log = read([line.replace(old, damaged) for line in new])
        assert numbers(log) == [1, 2, 3]
        assert [r.optimizer_step_ms for r in log.iterations] == [70.01, 70.02, 70.03]


def test_memory_behind_lost_timers_is_of_no_iteration(read):
    new = form("deepspeed_0_19")
    lost = [line.replace("time (ms) | fwd:", "timX (ms) | fwd:") if "75.03" in line else line
            for line in new]  # fmt: skip
    for lines, unknown in ((new, []), (lost, [3])):
        steps = [m.iteration for m in read(lines).memory if m.title == "Engine after step"]
        assert steps == [number if number not in unknown else None for number in (1, 2, 3)]


def test_zeros_between_timers_hide_what_they_touch(read):
    lines = [line if "step: 40.04" not in line else "\0" * 50 + line[50:] for line in OLD]
    found = updates(read(lines))
    assert found.items() <= OLD_UPDATES.items()
    assert 3 not in found
    # From a micro-step of iteration 3 to the update of iteration 4: nothing is there twice.
    start = next(i for i, line in enumerate(OLD) if "step_microstep: 40.03" in line)
    end = next(i for i, line in enumerate(OLD) if "optimizer_step: 38.04" in line)
    found = updates(read([*OLD[:start], "\0" * 900, *OLD[end + 1 :]]))
    assert found.items() <= OLD_UPDATES.items()
    assert 2 in found


CORE = form("megatron_core")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("iteration       42/", "iteration       47/"),
        ("iteration       41/", "iteration        1/"),
        ("samples:          672", "samples:          752"),
        ("iteration       44/", "iteration    44x"),
    ],
)
def test_of_two_counters_the_neighbours_tell_the_damaged_one(read, old, new):
    whole = read(CORE)
    log = read([line.replace(old, new) for line in CORE])
    losses = {r.iteration: r.loss for r in whole.iterations}
    assert set(numbers(log)) <= set(losses)
    assert set(numbers(log)) >= {42, 43}
    assert [r for r in log.iterations if r.iteration == 42] == [whole.iterations[1]]


def test_a_line_without_any_number_is_no_first_iteration(read):
    line = form("bigscience")[0]
    for old, new in (("iteration    13910/", "iterXtion    13910/"), ("iteration    13910/", "")):
        damaged = line.replace(old, new).replace("consumed samples", "consumed sXmples")
        log = read([damaged.replace("global batch size:  1024", "global batch size:  x")])
        assert log.iterations == []
        assert "an iteration whose number is lost" in [reject.reason for reject in log.rejects]


def test_a_line_cut_in_two_gives_no_half_number(read):
    lines = form("megatron_deepspeed")
    at = next(i for i, line in enumerate(lines) if "(ms): 900.0" in line)
    first, second = lines[at].split("00.0 |", 1)
    log = read([*lines[:at], first, "00.0 |" + second, *lines[at + 1 :]])
    assert all(r.iteration_s in (None, 0.9) for r in log.iterations if r.iteration == 1)


def test_a_last_field_needs_no_bar_where_no_line_has_one(read):
    lines = [line.partition(" learning rate")[0].removesuffix(" |") for line in CORE[:3]]
    lines += [line.partition(" | learning rate")[0] for line in CORE[3:]]
    log = read(lines)
    assert [r.tflops for r in log.iterations] == [41.3, 83.5, 84.2, 83.8]


def test_lines_run_together_stay_apart(read):
    lines = form("megatron_deepspeed")
    whole = read(lines).iterations
    for at in (i for i, line in enumerate(lines) if "elapsed time" in line and i + 1 < len(lines)):
        glued = [*lines[:at], lines[at] + "x" + lines[at + 1], *lines[at + 2 :]]
        assert read(glued).iterations == whole


def test_a_single_time_and_a_single_rate_that_disagree_are_both_missing(read):
    log = read([line.replace("(ms): 398.7", "(ms): 998.7") for line in CORE])
    record = log.iterations[2]
    assert (record.iteration, record.iteration_s, record.tflops) == (43, None, None)
    assert [r.iteration_s for r in log.iterations if r is not record] == [0.8124, 0.402, 0.4005]
