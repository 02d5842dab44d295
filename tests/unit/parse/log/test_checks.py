"""What a log says twice: the damaged one of two figures never counts."""

import pytest

from parse.log.read import read_log


def lines_of(number):
    """An iteration whose every figure agrees with the others: 8 samples of 64 tokens."""
    seconds, rate = 0.5 + number / 16, 3e-4 / number
    forward, inner = 100.0 + number, 150.0 + number
    return [
        f"[Rank 0] step={number}, skipped=0, lr=[{rate!r}], mom=[(0.9, 0.95)]",
        f"[Rank 0] time (ms) | optimizer_step: {60 + number}.00",
        *(
            f"[Rank 0] time (ms) | fwd_microstep: {forward / 2:.2f} | bwd_microstep:"
            f" {inner / 2 + 5:.2f} | bwd_inner_microstep: {inner / 2:.2f} |"
            f" bwd_allreduce_microstep: 5.00 | step_microstep: {step:.2f}"
            for step in (0.0, 70 + number)
        ),
        f"[Rank 0] time (ms) | fwd: {forward:.2f} | bwd: {inner + 10:.2f} | bwd_inner:"
        f" {inner:.2f} | bwd_allreduce: 10.00 | step: {70 + number:.2f}",
        f" elapsed_time {seconds:.6f} | consumed samples: {8 * number} |"
        f" consumed tokens: {512 * number} | elapsed time per iteration (ms): {seconds * 1e3:.1f} |"
        f" learning rate: {rate:.3E} | global batch size: 8 | lm loss: {9 - number / 8:.6E} |"
        " loss scale: 1.0 | actual seqlen: 64 | number of skipped iterations: 0 |"
        f" number of nan iterations: 0 | samples per second: {8 / seconds:.3f} |"
        f" TFLOPs: {33 / seconds:.2f} |",
    ]


TIMERS = {
    *("forward_ms", "backward_ms", "backward_inner_ms", "backward_allreduce_ms"),
    *("update_ms", "optimizer_step_ms"),
}
WHOLE = [line for number in range(1, 7) for line in lines_of(number)]


def read(write_log, lines):
    return read_log(write_log(text="".join(f"{line}\n" for line in lines)))


def changed(number, part, old, new):
    """The log with one text replaced, in the line of iteration ``number`` that holds ``part``."""
    at = next(i for i in range(6 * (number - 1), len(WHOLE)) if part in WHOLE[i])
    assert old in WHOLE[at]
    return [*WHOLE[:at], WHOLE[at].replace(old, new), *WHOLE[at + 1 :]]


def test_a_sound_log_passes_every_check(write_log):
    log = read(write_log, WHOLE)
    assert (log.rejects, log.notes) == ([], [])
    assert [r.iteration for r in log.iterations] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("part", "old", "new", "why"),
    [
        ("elapsed_time", "TFLOPs: 48.00", "TFLOPs: 18.00", "time and TFLOP/s"),
        ("elapsed_time", "learning rate: 1.000E-04", "learning rate: 1.200E-04", "learning rate"),
        ("step=3", "lr=[", "lr=[9", "learning rate"),
        ("elapsed_time", "samples: 24", "samples: 32", "counters"),
        ("elapsed_time", "samples: 24", "samples: 25", "counters"),
        ("elapsed_time", "samples: 24", "samples: ?", "'consumed samples' cannot be read"),
        ("elapsed_time", "tokens: 1536", "tokens: 1936", "counters"),
        ("elapsed_time", "elapsed_time 0.687500", "elapsed_time 0.987500", "two times"),
        ("elapsed_time", "elapsed_time 0.687500", "elapsXd_time 0.687500", "without elapsed_s"),
        ("elapsed_time", "(ms): 687.5", "(ms): 987.5", "two times"),
        ("elapsed_time", "samples per second: 1", "samples per second: 9", "samples per second"),
        ("elapsed_time", "global batch size: 8", "global batch size: 4", "another global batch"),
        ("elapsed_time", "loss scale", "loss scXle", "a label that no other line has"),
        ("elapsed_time", "lm loss: 8.6", "lm loss: 8.6 | lm loss: 8.6", "run together"),
        ("elapsed_time", "| TFLOPs: 48.00 |", "| TFLOPs: 48.00", "ends as no other"),
        ("elapsed_time", "| actual seqlen: 64", "", "without seq_length"),
    ],
)
def test_an_iteration_line_that_is_contradicted_is_left_out(write_log, part, old, new, why):
    whole = read(write_log, WHOLE).iterations
    log = read(write_log, changed(3, part, old, new))
    assert log.iterations == whole[:2] + whole[3:]
    assert [reject.line_number for reject in log.rejects] == [18]
    assert why in log.rejects[0].reason
    assert log.notes == ["iterations missing: 3"]


@pytest.mark.parametrize(
    ("part", "old", "new", "why"),
    [
        ("fwd:", "fwd: 103.00", "fwd: 193.00", "forward_ms is not the sum"),
        ("fwd:", "bwd_inner: 153.00", "bwd_inner: 13.00", "backward_inner_ms is not the sum"),
        ("fwd:", "bwd_allreduce: 10.00", "bwd_allreduce: 90.00", "allreduce_ms is not the sum"),
        ("fwd:", "step: 73.00", "step: 93.00", "update_ms is not the sum"),
        ("optimizer_step", "63.00", "963.00", "longer than the update"),
        ("fwd_microstep", "fwd_microstep: 51.50", "fwd_microstep: 1.50", "forward_ms is not"),
    ],
)
def test_timers_that_are_contradicted_are_left_out_alone(write_log, part, old, new, why):
    whole = read(write_log, WHOLE).iterations
    log = read(write_log, changed(3, part, old, new))
    assert log.iterations[:2] + log.iterations[3:] == whole[:2] + whole[3:]
    record, expected = vars(log.iterations[2]), vars(whole[2])
    assert {name for name in expected if record[name] != expected[name]} == TIMERS
    assert all(record[name] is None for name in TIMERS)
    assert [reject.line_number for reject in log.rejects] == [17]
    assert why in log.rejects[0].reason


def test_a_damaged_timer_line_is_left_out_alone(write_log):
    whole = read(write_log, WHOLE).iterations
    for part, old, new, lost in (
        ("fwd:", "bwd: 163.00", "bwd: 1e3.00", TIMERS - {"optimizer_step_ms"}),
        ("fwd:", "bwd: 163.00", "bXd: 163.00", TIMERS - {"optimizer_step_ms"}),
        ("fwd:", "| bwd: 163.00", "x bwd: 163.00", TIMERS - {"optimizer_step_ms"}),
        ("optimizer_step", "63.00", "6x3.00", {"optimizer_step_ms"}),
        ("optimizer_step", "time (ms)", "timX (ms)", {"optimizer_step_ms"}),
        ("fwd_microstep", "fwd_microstep: 51.50", "fwd_micr|step: 51.50", set()),
    ):
        log = read(write_log, changed(3, part, old, new))
        record, expected = vars(log.iterations[2]), vars(whole[2])
        assert {name for name in expected if record[name] != expected[name]} == lost
        assert len(log.rejects) == 1


def test_the_only_line_with_another_batch_is_left_out(write_log):
    name = "log-7B-tp1-dp1-l2-h4-a2-sl64-gbs8-mbs1-ratio1-subg100-prefetch0.log"
    lines = [line.replace("batch size: 8", "batch size: 4") for line in lines_of(2)]
    text = "".join(f"{line}\n" for line in [*lines_of(1), *lines])
    log = read_log(write_log(name, text=text))
    assert [r.iteration for r in log.iterations] == [1]
    assert [r.reason for r in log.rejects] == ["an iteration line with another global batch size"]


def test_a_batch_that_grows_is_no_contradiction(write_log):
    core = " iteration {0}/ 9 | consumed samples: {1} | elapsed time per iteration (ms): 500.0 |"
    core += " global batch size: {2} | lm loss: 8.5 | number of skipped iterations: 0 |"
    ramped = [core.format(n, s, b) for n, s, b in ((1, 8, 8), (2, 16, 8), (3, 32, 16), (4, 48, 16))]
    assert [r.iteration for r in read(write_log, ramped).iterations] == [1, 2, 3, 4]


def test_a_single_time_is_held_against_the_samples_per_second(write_log):
    lines = [line.replace("elapsed time per", "time per") for line in WHOLE]
    lines = [line.replace("elapsed_time 0.687500", "elapsed_time 0.187500") for line in lines]
    log = read(write_log, lines)
    assert [r.iteration for r in log.iterations] == [1, 2, 4, 5, 6]
    assert [r.line_number for r in log.rejects] == [18]


def test_without_micro_steps_backward_is_the_sum_of_its_parts(write_log):
    lines = changed(3, "fwd:", "bwd: 163.00", "bwd: 963.00")
    log = read(write_log, [line for line in lines if "_microstep" not in line])
    record = log.iterations[2]
    assert all(getattr(record, name) is None for name in TIMERS)
    assert record.loss == 8.625
    assert [r.reason for r in log.rejects] == ["timers whose parts of backward do not add up to it"]


def test_a_check_that_most_of_the_log_fails_is_not_trusted(write_log):
    lines = [line.replace("TFLOPs: ", "TFLOPs: 1") for line in WHOLE[:12]] + WHOLE[12:24]
    log = read(write_log, lines)
    assert [r.iteration for r in log.iterations] == [1, 2, 3, 4]
    assert all(record.tflops for record in log.iterations)


def test_an_iteration_that_nothing_numbers_is_left_out(write_log):
    lines = [line for line in WHOLE if "step=" not in line]
    last = lines[-1].replace("samples: 48", "samples: 47").replace("tokens: 3072", "tokens: 3073")
    log = read(write_log, [*lines[:-1], last])
    assert [r.iteration for r in log.iterations] == [1, 2, 3, 4, 5]
    assert [r.reason for r in log.rejects] == ["an iteration line whose counters do not agree"]


def test_a_number_that_goes_back_without_a_new_run_is_no_new_run(write_log):
    lines = [*WHOLE, *lines_of(2)]
    log = read(write_log, lines)
    assert [r.iteration for r in log.iterations] == [1, 2, 3, 4, 5, 6]
    log = read(write_log, [*WHOLE, "using world size: 1, data-parallel-size: 1", *lines_of(2)])
    assert [r.iteration for r in log.iterations] == [2]
    assert log.iterations[0].forward_ms == 102.0


def test_a_split_line_is_not_a_nan(write_log):
    for cut in (" lm loss", "m loss", " loss scale", " 8.625"):
        at = next(i for i, line in enumerate(WHOLE) if "samples: 24" in line)
        halves = WHOLE[at].replace(cut, "\n" + cut, 1)
        log = read(write_log, [*WHOLE[:at], halves, *WHOLE[at + 1 :]])
        by_number = {record.iteration: record for record in log.iterations}
        assert 3 not in by_number or by_number[3].loss in (None, 8.625)
        assert by_number[4] == read(write_log, WHOLE).iterations[3]
