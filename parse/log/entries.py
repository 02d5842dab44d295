"""One log line to its values, or to the reason why it is left out. Standard library alone.

A line counts as a whole or not at all: where a part of it cannot be read, or two lines have run
into each other, nothing tells which of its other digits are sound.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from parse.log.fields import (
    INTERVAL_TIMER,
    ITERATION_FIELDS,
    ITERATION_HEAD,
    ITERATION_START,
    LABELLED,
    MICRO,
    TIMER_FIELDS,
    TIMERS_HEAD,
)

RUN_TOGETHER = "two lines run together"
CUT_OFF = "cut off: the log ends here"


class Mark(Enum):
    """What a line tells of the lines around it."""

    LINES_LOST = auto()
    RUN_START = auto()


class ProgressLine(NamedTuple):
    """A line with DeepSpeed's count of iterations."""

    step: int
    learning_rate: str | None
    """As printed, in full precision; None where the line does not have it."""


@dataclass
class LabelledLine:
    """A line of labels and values."""

    number: int
    """Position in the log, from 1."""
    text: str
    problem: str = ""
    """Why the line cannot be used; empty for a sound one."""
    unknown: list[str] = field(default_factory=list)
    """Labels that are not in the table of fields."""


@dataclass
class IterationLine(LabelledLine):
    """The line that Megatron prints at the end of an iteration."""

    cut: bool = False
    """Whether the log ends inside the line."""
    values: dict[str, str] = field(default_factory=dict)
    """Text of each value, by its name in the table of fields."""
    bar_at_end: bool = True
    """Whether a bar follows the last field."""

    @property
    def loss(self) -> float | None:
        """The loss, NaN where the line has none; None where it says nothing of it."""
        loss, skipped = self.real("loss"), self.integer("skipped")
        if loss is None and skipped is not None:
            # Megatron prints no loss that is NaN, nor that of a step which the loss scaler skipped.
            return None if skipped and not self.integer("nan") else math.nan
        return loss

    def integer(self, name: str) -> int | None:
        """A value as a whole number; None when it is not there."""
        return int(self.values[name]) if name in self.values else None

    def real(self, name: str) -> float | None:
        """A value as a number; None when it is not there."""
        return float(self.values[name]) if name in self.values else None


@dataclass
class TimerLine(LabelledLine):
    """A line of DeepSpeed's timers, in ms, by the name of their field."""

    main: dict[str, float] = field(default_factory=dict)
    """Of the iteration."""
    micro: dict[str, float] = field(default_factory=dict)
    """Of one micro-batch."""

    @property
    def ends_iteration(self) -> bool:
        """Whether DeepSpeed prints this line last in an iteration."""
        return bool(self.main.keys() - {"optimizer_step_ms"})


def iteration_line(number: int, text: str, cut: bool) -> IterationLine | None:
    """Read an iteration line; None where the text holds no field of one.

    Args:
        number: Position of the line in the log, from 1.
        text: The line.
        cut: Whether the log ends inside the line.
    """
    line = IterationLine(number, text, cut=cut)
    head = ITERATION_HEAD.search(text)
    first, *parts = text[head.start() if head else 0 :].split("|")
    if start := ITERATION_START.fullmatch(first):
        line.values |= {name: value for name, value in start.groupdict().items() if value}
    else:
        parts.insert(0, first)
    last = INTERVAL_TIMER.sub("", parts.pop()) if parts else ""
    for part in parts:
        _take_field(line, part)
    if last.strip():
        line.bar_at_end = False
        _take_field(line, last)
    if cut and not line.bar_at_end:
        line.problem = CUT_OFF
    known = {known.name for known in ITERATION_FIELDS.values()}
    return line if line.values.keys() & known else None


def _take_field(line: IterationLine, part: str) -> None:
    found = LABELLED.fullmatch(part)
    label, value = found.groups() if found else ("", "")
    known = ITERATION_FIELDS.get(label)
    if not found:
        line.problem = "an iteration line with a field that cannot be read"
    elif known is None:
        line.unknown.append(label)
        line.problem = RUN_TOGETHER if ":" in value else line.problem
    elif not known.value.fullmatch(value):
        line.problem = f"an iteration line whose {label!r} cannot be read"
    elif known.name in line.values:
        line.problem = RUN_TOGETHER
    else:
        line.values[known.name] = value.partition(" ")[0]


def timer_line(number: int, text: str) -> TimerLine:
    """Read a line of DeepSpeed's timers; labels of other timers are left out."""
    line = TimerLine(number, text)
    _, head, rest = text.partition(TIMERS_HEAD)
    if not head:
        line.problem = "a timer line without its beginning"
    for part in rest.split("|")[1:]:
        label, colon, value = (text.strip() for text in part.partition(":"))
        known = TIMER_FIELDS.get(label.removesuffix(MICRO))
        if known is None and colon:
            line.unknown.append(label)
        elif known is None or not known.value.fullmatch(value):
            line.problem = "a timer line with a value that cannot be read"
        else:
            found = line.micro if label.endswith(MICRO) else line.main
            found[known.name] = float(value.partition(" ")[0])
    return line
