"""The one table of regular expressions for log lines. Standard library alone.

Of a line, values are found by their label, wherever it stands, so that ``hostname: `` or
``[rank0]:`` prefixes and DeepSpeed's ``[date] [INFO] [file]`` do no harm; and each number must be
followed by what its writer puts there, so that a line cut inside a number gives no number.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_DECIMAL = r"\d{1,12}(?:\.\d{0,20})?"
_NUMBER = rf"[-+]?{_DECIMAL}(?:[eE][-+]?\d{{1,3}})?"
_LOSS = rf"(?:{_NUMBER}|[-+]?(?:nan|NaN|NAN|inf|Inf|INF|Infinity))"
_INTEGER = r"\d{1,18}"
_WITH_AVERAGE = rf"{_DECIMAL}(?: \(avg {_DECIMAL}\))?"


class LineField(NamedTuple):
    """One fact of a log line."""

    name: str
    """Field of the record it goes to."""
    unit: str
    label: str
    """What is printed before the value."""
    value: re.Pattern[str]
    """Matches the whole of a well-formed value."""


def _fields(*rows: tuple[str, str, str, str]) -> dict[str, LineField]:
    return {
        label: LineField(name, unit, label, re.compile(value)) for name, unit, label, value in rows
    }


INTERVAL_TIMER = re.compile(rf"<TIMER:interval-time,\s*({_DECIMAL}(?:[eE]-\d{{1,3}})?)\s*>")
"""Seconds; one a rank and iteration, without the rank; several may stand in one line."""
ANY_TIMER = re.compile(r"<TIMER:([^,<>|]{1,60}),[^,<>|]{0,40}>|TIMER:interval-time")
INTERVAL_NAME = "interval-time"

ITERATION_START = re.compile(
    r"\biteration\s+(?P<iteration>\d{1,12})\s*/\s*(?P<last>\d{1,12})\s*$"
    r"|\belapsed_time\s+(?P<elapsed_s>\d{1,9}\.\d{6})\s*$"
)
"""What an iteration line begins with: Megatron's, and the paper's fork's (in s)."""
ITERATION_HEAD = re.compile(r"\belapsed_time \d|\biteration +\d+ */|\bconsumed samples:")
"""Where one begins that is run together with another line."""
TIMERS_HEAD = "time (ms)"
ITERATION_LINE = _fields(
    ("samples", "samples", "consumed samples", _INTEGER),
    ("tokens", "tokens", "consumed tokens", _INTEGER),
    ("elapsed_ms", "ms", "elapsed time per iteration (ms)", _DECIMAL),
    ("interval_s", "s", "elapsed time per iteration (s)", _DECIMAL),
    ("learning_rate", "", "learning rate", _NUMBER),
    ("global_batch_size", "samples", "global batch size", _INTEGER),
    ("loss", "", "lm loss", _LOSS),
    ("grad_norm", "", "grad norm", _LOSS),
    ("seq_length", "tokens", "actual seqlen", _INTEGER),
    ("skipped", "iterations", "number of skipped iterations", _INTEGER),
    ("nan", "iterations", "number of nan iterations", _INTEGER),
    ("samples_per_s", "samples/s", "samples per second", _DECIMAL),
    ("tflops", "TFLOP/s", "TFLOPs", _DECIMAL),
    ("tflops", "TFLOP/s", "throughput per GPU (TFLOP/s/GPU)", _WITH_AVERAGE),
    ("tflops", "TFLOP/s", "compute per GPU (TFLOP/s/GPU)", _WITH_AVERAGE),
)  # fmt: skip
OTHER_LABELS = {
    *("loss scale", "num zeros", "params norm", "curriculum seqlen", "random ltd reserved length"),
    *(
        "tokens per gpu per second (tgs)",
        "skipped samples",
        "mem usages",
        "decoupled learning rate",
    ),
}
LABELLED = re.compile(r"\s*([^:|]{2,60}?):\s*(.*?)\s*$", re.DOTALL)

PHASE_LINE = _fields(
    ("forward_ms", "ms", "fwd", _DECIMAL),
    ("forward_ms", "ms", "forward", _DECIMAL),
    ("backward_ms", "ms", "bwd", _DECIMAL),
    ("backward_ms", "ms", "backward", _DECIMAL),
    ("backward_inner_ms", "ms", "bwd_inner", _DECIMAL),
    ("backward_inner_ms", "ms", "backward_inner", _DECIMAL),
    ("backward_allreduce_ms", "ms", "bwd_allreduce", _DECIMAL),
    ("backward_allreduce_ms", "ms", "backward_allreduce", _DECIMAL),
    ("update_ms", "ms", "step", _DECIMAL),
    ("optimizer_step_ms", "ms", "optimizer_step", _DECIMAL),
)
"""``[Rank 0] time (ms) | ...``; the same with ``_microstep`` behind is of one micro-batch alone."""
MICRO = "_microstep"
MOE_DETAIL = re.compile(r"\s*\(\w+:.*$")
VALUE_END = re.compile(r"\s*[<\[].*$", re.DOTALL)

PROGRESS = re.compile(r"\bstep=(\d{1,12}), skipped=\d{1,12}, lr=\[(?:([-+.eE\d]{1,30})[,\]])?")
GLOBAL_STEP = re.compile(r"/global_step=(\d{1,12}),")
