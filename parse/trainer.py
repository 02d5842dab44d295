"""What Hugging Face's Trainer and LLaMA-Factory log as JSON, an object a step.

``trainer_state.json`` (its ``log_history``), ``trainer_log.jsonl``, and the like of other trainers
on top of them. Standard library alone.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from parse.composer import COMPOSER_STEP, joined
from parse.figures import NOT_FINITE, figure
from parse.lines import Line, plain_name, read_lines
from parse.records import as_number

_STEPS = {
    "step": "Hugging Face Trainer",
    "current_steps": "LLaMA-Factory",
    "global_step/max_steps": "ms-swift",
    "global_step": "a training loop",
    COMPOSER_STEP: "Composer",
}
"""Keys under which programs count their steps."""
_RATES = ("learning_rate", "lr")
_GIB_KEYS = ("vram_allocated", "memory(GiB)")
_FIGURES = ("loss", "eval_loss", "train_loss", "learning_rate", "lr", "epoch")
"""One of these makes an object with a step one of training."""
_OF_NO_STEP = ("eval", "predict", "train_")
"""What figures of an evaluation, of a prediction and of a run as a whole begin with."""
_BARE = re.compile(rf"(?<=:) *{NOT_FINITE}(?= *[,}}\]])")
"""A value that is not finite, in place of JSON's."""
_TIME = re.compile(r"(?:(\d{1,5}) days?, )?(\d{1,4}):(\d\d):(\d\d)(?:\.\d{1,9})?")
COARSEST_S = 10.0
"""Elapsed times are whole seconds: a shorter difference of two says too little."""


class Entry(NamedTuple):
    """What an object says of a step; None where it says nothing."""

    program: str
    step: int
    """Updates so far."""
    loss: float | None
    """Mean since the entry before, in nats."""
    grad_norm: float | None
    learning_rate: float | None
    tokens: int | None
    """Consumed so far."""
    elapsed_s: float | None
    """Since training began or went on, in whole seconds."""
    device_memory_gib: float | None
    """Peak of the device's allocator."""


def is_json_log(path: Path) -> bool:
    """Return whether a log holds JSON alone, by its name: what else stands there is damage."""
    return plain_name(path).lower().endswith((".json", ".jsonl"))


class JsonLines:
    """The lines of a log; counts those that are no JSON in a file of nothing else."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._other: list[int] = []

    def __iter__(self) -> Iterator[Line]:
        """Yield every line."""
        is_json = is_json_log(self._path)
        for line in joined(read_lines(self._path)):
            if is_json and line.text.strip() and not as_object(line):
                self._other.append(line.number)
            yield line

    @property
    def notes(self) -> list[str]:
        """Say which lines were left out."""
        count = len(self._other)
        return [f"{count} lines that are no JSON, from line {self._other[0]} on"] if count else []


def read_entry(line: Line) -> Entry | None:
    """Read a line of a JSON log; None where it is no object that names a step of training."""
    fields = as_object(line)
    name = next((name for name in _STEPS if name in fields), None)
    if name is None or not any(figure in fields for figure in _FIGURES):
        return None
    step = as_number(str(fields[name]).partition("/")[0])
    if step is None or not math.isfinite(step) or step != int(step) or step < 0:
        return None

    def first(*names: str) -> float | None:
        return next((n for name in names if (n := as_number(fields.get(name))) is not None), None)

    tokens = first("total_tokens", "num_input_tokens_seen")
    return Entry(
        _STEPS[name],
        int(step),
        _loss(fields),
        first("grad_norm"),
        first(*_RATES),
        int(tokens) if tokens and math.isfinite(tokens) else None,
        _seconds(fields.get("elapsed_time")),
        first(*_GIB_KEYS) or None,
    )


def _loss(fields: dict[str, Any]) -> float | None:
    """The loss of a step, NaN where it is null or a text that is no number.

    Null is also how an evaluation and the end of a run say that they have none: they have figures
    of their own, or no learning rate either.
    """
    if "loss" not in fields:
        return None
    value = fields["loss"]
    if (number := as_number(value)) is not None or not isinstance(value, str | None):
        return number
    is_other = any(fields[name] is not None for name in fields if name.startswith(_OF_NO_STEP))
    rates = [fields[name] for name in _RATES if name in fields]
    has_no_rate = bool(rates) and rates.count(None) == len(rates)
    return None if is_other or has_no_rate else figure(value or "nan")


def as_object(line: Line) -> dict[str, Any]:
    """Return the JSON object that a line is; empty for any other line."""
    text = line.text.lstrip("\ufeff \t")
    if not text.startswith("{"):
        return {}
    value = _json(text)
    if value is None:  # a number may be spelled as C spells it
        value = _json(_BARE.sub(lambda found: json.dumps(figure(found[0])), text))
    return value if isinstance(value, dict) else {}


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _seconds(value: object) -> float | None:
    found = _TIME.fullmatch(value) if isinstance(value, str) else None
    if not found:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
