"""Which iteration figures are of, where lines are damaged or lost."""

import re
from pathlib import Path

import pytest

from parse.log import read_log

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


@pytest.mark.parametrize("number", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("more", "tags"),
    [([], True), (["step"], True), (["optimizer_step"], True), ([], False), (["step"], False)],
)
def test_lost_timers_leave_a_gap(read, number, more, tags):
    update = f"step: {OLD_UPDATES[number]:.2f}"
    lost = {"step": f" step={number},", "optimizer_step": f"optimizer_step: 38.0{number}"}
    lines = OLD if tags else without(OLD, " step=")
    found = updates(read(without(lines, update, *(lost[name] for name in more))))
    assert number not in found
    assert found.items() <= OLD_UPDATES.items()


def test_a_damaged_progress_line_is_left_out_alone(read):
    log = read([line.replace(" step=2,", " stXp=2,") for line in OLD])
    assert updates(log) == OLD_UPDATES
    assert [reject.reason for reject in log.rejects] == ["a progress line that cannot be read"]


@pytest.mark.parametrize("length", [2, 5, 9])
def test_a_cut_line_of_timers_gives_no_half_number(read, length):
    log = read(form("deepspeed_0_19")[:-3])
    whole = updates(log)
    path = log.path
    path.write_bytes(path.read_bytes().rstrip()[:-length])
    assert updates(read_log(path)) == {n: ms for n, ms in whole.items() if n < 3}
    assert read_log(path).ends_mid_line


def test_timers_between_two_steps_that_do_not_agree_are_left_out(read):
    new = form("deepspeed_0_19")
    for old, damaged in (("global_step=2,", "global_step=7,"), (" step=2,", " step=7,")):
        log = read([line.replace(old, damaged) for line in new])
        assert numbers(log) == [1, 3]
        assert len(log.rejects) == 1


CORE = form("megatron_core")


def test_a_number_that_leaps_over_the_next_is_left_out(read):
    lines = [re.sub(r" consumed samples: +\d+ \|", "", line) for line in CORE]
    log = read([line.replace("iteration       42/", "iteration       92/") for line in lines])
    assert numbers(log) == [41, 43, 44]
    reason = "an iteration number that the next one contradicts"
    assert [reject.reason for reject in log.rejects] == [reason]


def test_a_counter_that_most_lines_contradict_is_not_trusted(read):
    log = read([line.replace("samples:          6", "samples:          9") for line in CORE])
    assert numbers(log) == [41, 42, 43, 44]


def test_a_line_without_any_number_is_no_first_iteration(read):
    line = form("bigscience")[0]
    for old, new in (("iteration    13910/", "iterXtion    13910/"), ("iteration    13910/", "")):
        damaged = line.replace(old, new).replace("consumed samples", "consumed sXmples")
        log = read([damaged.replace("global batch size:  1024", "global batch size:  x")])
        assert log.iterations == []
        assert len(log.rejects) == 1
    lost = line.replace("iteration    13910/  953674 |", "").replace("global batch", "batch")
    assert "an iteration whose number is lost" in [r.reason for r in read([lost]).rejects]


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
    cut = log.path
    cut.write_bytes(cut.read_bytes()[:-3])  # 83
    log = read_log(cut)
    assert [r.tflops for r in log.iterations] == [41.3, 83.5, 84.2]
    assert [reject.reason for reject in log.rejects] == ["cut off: the log ends here"]


def test_lines_run_together_are_left_out(read):
    lines = form("megatron_deepspeed")
    whole = read(lines).iterations
    for at in (i for i, line in enumerate(lines) if "elapsed time" in line and i + 1 < len(lines)):
        log = read([*lines[:at], lines[at] + "x" + lines[at + 1], *lines[at + 2 :]])
        assert [reject.line_number for reject in log.rejects] == [at + 1]
        assert int(lines[at].split()[1].rstrip("/")) not in numbers(log)
        for record in log.iterations:
            for name, value in vars(record).items():
                assert value in (None, getattr(whole[record.iteration - 1], name))


@pytest.mark.parametrize("name", ["deepspeed_0_19", "deepspeed_old", "megatron_deepspeed"])
def test_of_any_two_lines_run_together_nothing_counts(read, name):
    lines = [
        line for line in form(name) if re.search(r"time \(ms|step=|Max_MA|CPU V|elapsed", line)
    ]
    whole = {record.iteration: vars(record) for record in read(lines).iterations}
    for at in range(len(lines) - 1):
        log = read([*lines[:at], lines[at] + "x" + lines[at + 1], *lines[at + 2 :]])
        assert at + 1 in [reject.line_number for reject in log.rejects]
        assert "two lines run together" in [reject.reason for reject in log.rejects]
        for record in log.iterations:
            for field, value in vars(record).items():
                assert value in (None, whole[record.iteration][field])


def test_fields_run_together_leave_their_line_out(read):
    for old in ("| grad norm", "| loss scale"):
        log = read([CORE[0], CORE[3].replace(old, old.replace("|", "x")), *CORE[4:]])
        assert 41 not in numbers(log)
        assert [reject.reason for reject in log.rejects] == ["two lines run together"]
