"""Logs as they are written, and as accidents leave them."""

import json
import math
import tempfile
from pathlib import Path

import hypothesis.strategies as st
from hypothesis import given, settings

from parse.log import read_log
from parse.verdict import compare, log_notes

NAME = "log-1B-tp1-dp{}-l2-h8-a2-sl16-gbs4-mbs1-ratio1-subg10-prefetch1-flush_async1-opt_gaps2.log"
PHASES = ("fwd", "bwd", "bwd_inner", "bwd_allreduce", "step")
FIELDS = (
    *("forward_ms", "backward_ms", "backward_inner_ms", "backward_allreduce_ms", "update_ms"),
    *("loss", "learning_rate", "tflops", "tokens"),
)


def phases_ms(hundredths_ms):
    """Backward is the sum of its parts, as it is in a log."""
    forward, inner, allreduce, step = hundredths_ms
    return tuple(v / 100 for v in (forward, inner + allreduce, inner, allreduce, step))


seconds = st.floats(0.001, 1000).map(lambda value: round(value, 12))
hundredths = st.integers(0, 10**8)
losses = st.one_of(
    st.none(), st.floats(1e-3, 99).map(lambda v: float(f"{v:.6E}")), st.just(math.inf)
)
iterations = st.lists(
    st.fixed_dictionaries(
        {"times": st.lists(seconds, min_size=3, max_size=3), "loss": losses,
         "phases": st.tuples(*[hundredths] * 4).map(phases_ms)}
    ),
    min_size=1, max_size=6,
)  # fmt: skip


def log_lines(rows, ranks):
    """Lines of a log; ``rows`` as the strategy ``iterations`` draws them."""
    lines = [f"using world size: {ranks}, data-parallel-size: {ranks}"]
    for number, row in enumerate(rows, 1):
        pairs = zip(PHASES, row["phases"], strict=True)
        lines.append(
            "[Rank 0] time (ms) | " + " | ".join(f"{key}: {value:.2f}" for key, value in pairs)
        )
        lines += [f"<TIMER:interval-time,{t!r}>" for t in row["times"][:ranks]]
        time, loss = row["times"][ranks - 1], row["loss"]
        shown = "" if loss is None else f" lm loss: {loss:.6E} |"
        lines.append(
            f" elapsed_time {time:.6f} | consumed samples: {4 * number} |"
            f" consumed tokens: {64 * number} | elapsed time per iteration (ms): {time * 1e3:.1f} |"
            f" learning rate: 1.000E-04 | global batch size: 4 |{shown} loss scale: 1.0 |"
            " actual seqlen: 16 | number of skipped iterations: 0 |"
            f" number of nan iterations: 0 | samples per second: {4 / time:.3f} |"
            f" TFLOPs: {40 / time:.2f} |"
        )
    return lines


def read_text(data, ranks=1):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / NAME.format(ranks)
        path.write_bytes(data)
        return read_log(path)


def same(a, b):
    return a == b or (isinstance(a, float) and math.isnan(a) and math.isnan(b))


@settings(deadline=None, max_examples=50)
@given(
    rows=iterations,
    ranks=st.integers(1, 3),
    lost=st.sets(st.integers(0, 40), max_size=8),
    kept=st.floats(0, 1),
)
def test_lost_lines_and_a_cut_leave_gaps_but_never_another_iterations_number(
    rows, ranks, lost, kept
):
    lines = log_lines(rows, ranks)
    whole = read_text("".join(f"{line}\n" for line in lines).encode(), ranks)
    expected = {record.iteration: record for record in whole.iterations}
    text = "".join(f"{line}\n" for i, line in enumerate(lines) if i not in lost)
    log = read_text(text[: int(kept * len(text))].encode(), ranks)
    if "elapsed_time" not in text:
        return  # bare timers carry no number of their iteration
    for record in log.iterations:
        if record.loss is None and "tflops" not in record.printed:
            continue
        original = expected[record.iteration]
        assert abs(record.iteration_s - original.iteration_s) < 1.1e-6
        known = vars(original) | original.printed
        for name, value in (vars(record) | record.printed).items():
            if name in FIELDS:
                assert value is None or same(value, known[name]), name


@settings(deadline=None, max_examples=75)
@given(
    rows=iterations,
    flips=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), max_size=40),
    kept=st.floats(0, 1),
    noise=st.binary(max_size=60),
)
def test_a_damaged_log_is_never_an_error(rows, flips, kept, noise):
    data = bytearray("\n".join(log_lines(rows, 1)).encode())
    for position, value in flips:
        data[position % len(data)] = value
    damaged = bytes(data[: int(kept * len(data))]) + noise
    if damaged[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return  # UTF-16 is refused by name
    log, whole = read_text(damaged), read_text("\n".join(log_lines(rows, 1)).encode())
    json.dumps(compare(whole, log), allow_nan=False)
    assert all(note.isprintable() for note in log_notes(log))
    assert len(log.iterations) <= len(rows) + 1
