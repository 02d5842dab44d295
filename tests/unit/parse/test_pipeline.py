"""The line that DeepSpeed's pipeline engine prints, alone and beside a framework's own."""

import math

import pytest

from parse.diagnose import diagnose
from parse.log import read_log, read_usable_log

LOSSES = (9.5, 9.0, 8.5, 8.25, 8.0, 7.75)


def line(step, loss="9.5000", seconds="0.936", more="", name="steps"):
    return f"{name}: {step} loss: {loss} {more}iter time (s): {seconds} samples/sec: 136.706"


def text(lines):
    return "".join(f"{one}\n" for one in lines)


def figures(log):
    return [(r.iteration, r.loss, r.iteration_s) for r in log.iterations]


@pytest.mark.parametrize("every", [1, 10])
@pytest.mark.parametrize("more", ["", "lm loss: 5.5103 moe loss: 0.0405 "])
def test_a_pipelines_log_has_losses_and_times(write_log, every, more):
    lines = [line(every * (i + 1), f"{loss:.4f}", more=more) for i, loss in enumerate(LOSSES)]
    path = write_log(text=text(["building", *lines, "done"]))
    log = read_usable_log(path)
    assert figures(log) == [(every * (i + 1), loss, 0.936) for i, loss in enumerate(LOSSES)]
    assert (log.rejects, log.notes) == ([], [])
    found = diagnose(path)
    assert (found.num_steps, found.illnesses) == (6, [])


@pytest.mark.parametrize(
    "written",
    [
        line(7),
        f"worker-0: {line(7)}",
        f"[default0]:{line(7)}",
        line("    7 /  1000", name="step") + " eta: 0:03:01",
        f"  1%|   | 7/743 [00:22<31:07, 2.5s/it]{line(7)}",
        f"{line(7)}[2031-01-01 00:00:00,000] [INFO] [timer.py:1:stop] x",
        line(7).replace("136.706", "inf"),
    ],
)
def test_forms_of_the_line(write_log, written):
    assert figures(read_log(write_log(text=f"{written}\n"))) == [(7, 9.5, 0.936)]


def test_a_loss_that_is_nan_is_read(write_log):
    (record,) = read_log(write_log(text=text([line(1, "nan")]))).iterations
    assert math.isnan(record.loss)


@pytest.mark.parametrize(
    ("damaged", "reason"),
    [
        (line(2) + line(3), "two lines run together"),
        (line(2, "9.5x"), "a pipeline line whose 'loss' cannot be read"),
        (line(2)[:-12], "a pipeline line that cannot be read"),
    ],
)
def test_a_damaged_line_is_left_out(write_log, damaged, reason):
    log = read_log(write_log(text=text([line(1), damaged, line(4)])))
    assert [r.iteration for r in log.iterations] == [1, 4]
    assert [(r.line, r.reason) for r in log.rejects] == [(2, reason)]


def test_timers_and_memory_go_to_the_step_they_precede(write_log):
    timers = "[Rank 0] time (ms) | fwd: 10.25 | bwd: 20.00 | bwd_inner: 15.00 | step: 30.75"
    progress = "[Rank 0] step=10, skipped=0, lr=[0.001], mom=[[0.9, 0.95]]"
    after = "[Rank 0] time (ms) | pipe_send_output: 1.00 | pipe_recv_grad: 2.00"
    (record, other) = read_log(
        write_log(text=text([progress, timers, line(10), after, line(20)]))
    ).iterations
    assert (record.forward_ms, record.backward_ms, record.update_ms) == (10.25, 20.0, 30.75)
    assert other.forward_ms is None


def megatron(step, loss, ms, label="lm loss"):
    return (
        f" samples/sec: 1.0 | iteration {step:8d}/  100 | elapsed time per iteration (ms): {ms} | "
        f"learning rate: 3.000E-04 | {label}: {loss:.6E} | number of skipped iterations:   0 | "
        "number of nan iterations:   0 |"
    )


@pytest.mark.parametrize("label", ["lm loss", "lm_loss"])
@pytest.mark.parametrize("first", [True, False])
def test_a_step_that_is_printed_in_two_forms_is_one(write_log, label, first):
    """Each figure is that with more digits."""
    lines = []
    for step in (1, 2, 3):
        both = [line(step, "9.1235", "0.936"), megatron(step, 9.123456, 936.4, label)]
        lines += both if first else reversed(both)
    log = read_log(write_log(text=text(lines)))
    assert figures(log) == [(step, 9.123456, 0.9364) for step in (1, 2, 3)]
    assert {r.printed["learning_rate"] for r in log.iterations} == {3e-4}
    assert (log.rejects, log.notes) == ([], [])


def test_a_mean_over_more_steps_is_not_taken_for_finer_figures(write_log):
    lines = [*(line(step, f"9.{step}000") for step in (1, 2, 3)), megatron(3, 9.2, 800.0)]
    log = read_log(write_log(text=text(lines)))
    assert figures(log) == [(1, 9.1, 0.936), (2, 9.2, 0.936), (3, 9.3, 0.936)]
