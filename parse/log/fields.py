"""The labels and values of log lines, in one table. Standard library alone.

A value is found by its label, wherever in its line it stands, so prefixes such as ``hostname: ``,
``[rank0]:`` or DeepSpeed's ``[date] [INFO] [file]`` do no harm. A value must match its pattern
from end to end.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_DECIMAL = r"\d{1,12}(?:\.\d{0,20})?"
_NUMBER = rf"[-+]?{_DECIMAL}(?:[eE][-+]?\d{{1,3}})?"
_LOSS = rf"(?:{_NUMBER}|[-+]?(?:nan|NaN|NAN|inf|Inf|INF|Infinity))"
_INTEGER = r"\d{1,18}"
_WITH_AVERAGE = rf"{_DECIMAL}(?: \(avg {_DECIMAL}\))?"
_WITH_MOE_DETAIL = rf"{_DECIMAL}(?: \([^()]*\))?"


class Field(NamedTuple):
    """What stands behind a label: the name of the value, and a pattern of all of it."""

    name: str
    value: re.Pattern[str]


def _fields(*rows: tuple[str, str, str]) -> dict[str, Field]:
    return {label: Field(name, re.compile(value)) for label, name, value in rows}


LABELLED = re.compile(r"\s*([^:|]{2,60}?)\s*:\s*(.*?)\s*", re.DOTALL)
"""One part of a line, between two bars: a label and its value."""

ITERATION_HEAD = re.compile(r"\belapsed_time \d|\biteration +\d+ */|\bconsumed samples:")
"""Where an iteration line begins, behind whatever prefix."""
ITERATION_START = re.compile(
    r"iteration\s+(?P<iteration>\d{1,12})\s*/\s*\d{1,12}\s*"
    r"|elapsed_time\s+(?P<elapsed_s>\d{1,9}\.\d{6})\s*"
)
"""The first part of Megatron's iteration line, and of the paper's fork's."""
ITERATION_FIELDS = _fields(
    ("consumed samples", "samples", _INTEGER),
    ("consumed tokens", "tokens", _INTEGER),
    ("elapsed time per iteration (ms)", "elapsed_ms", _DECIMAL),
    ("elapsed time per iteration (s)", "interval_s", _DECIMAL),
    ("learning rate", "learning_rate", _NUMBER),
    ("global batch size", "global_batch_size", _INTEGER),
    ("lm loss", "loss", _LOSS),
    ("grad norm", "grad_norm", _LOSS),
    ("actual seqlen", "seq_length", _INTEGER),
    ("number of skipped iterations", "skipped", _INTEGER),
    ("number of nan iterations", "nan", _INTEGER),
    ("samples per second", "samples_per_s", _DECIMAL),
    ("TFLOPs", "tflops", _DECIMAL),
    ("throughput per GPU (TFLOP/s/GPU)", "tflops", _WITH_AVERAGE),
    ("compute per GPU (TFLOP/s/GPU)", "tflops", _WITH_AVERAGE),
)
OPTIONAL = {"loss", "grad_norm"}
"""Values that Megatron leaves out of the line of an iteration that has none."""

INTERVAL_TIMER = re.compile(rf"<TIMER:interval-time,\s*({_DECIMAL}(?:[eE]-\d{{1,3}})?)\s*>")
"""Seconds; one a rank and iteration, without the rank; several may stand in one line."""

TIMERS_HEAD = "time (ms)"
MICRO = "_microstep"
TIMER_FIELDS = _fields(
    *((label, "forward_ms", _WITH_MOE_DETAIL) for label in ("fwd", "forward")),
    *((label, "backward_ms", _DECIMAL) for label in ("bwd", "backward")),
    *((label, "backward_inner_ms", _DECIMAL) for label in ("bwd_inner", "backward_inner")),
    *(
        (label, "backward_allreduce_ms", _DECIMAL)
        for label in ("bwd_allreduce", "backward_allreduce")
    ),
    ("step", "update_ms", _DECIMAL),
    ("optimizer_step", "optimizer_step_ms", _DECIMAL),
)
"""``[Rank 0] time (ms) | ...``; the same with ``_microstep`` behind is of one micro-batch alone."""

PROGRESS = re.compile(r"\bstep=(\d{1,12}), skipped=\d{1,12}, lr=\[(?:([-+.eE\d]{1,30})[,\]])?")
"""DeepSpeed's progress line."""
GLOBAL_STEP = re.compile(r"/global_step=(\d{1,12}),")
"""DeepSpeed's throughput line."""
