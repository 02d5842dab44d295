"""Collects what a log says of its run, line by line; the lines are not kept."""

from __future__ import annotations

import functools
import math
import re
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from parse.failures import Failures
from parse.illnesses import quoted, quoted_line
from parse.lines import Line
from parse.log import TIMERS_MARK, RunFacts, timer_line
from parse.overflows import Overflows
from parse.records import Log
from parse.steps import Step, read_step

_BLOCK = re.compile(r'^\s*"(\w+)": \{\s*$')
_OF_BLOCKS = {
    "offload_optimizer": ("offload", re.compile(r'^\s*"device": "(\w+)"')),
    "deep_optimizer_states": ("overlapped", re.compile(r'^\s*"enabled": (\w+)')),
}
"""Settings that are told by the block around them."""
_SILENT_LINES = 100
"""A rank that told of no step while others told of so many does so no more."""
_BUILT = re.compile(
    r"(?:-MF|--dependency-output) (\S+)\.o\.d .*-DTORCH_EXTENSION_NAME=(\w+?)(?:_v(\d+))?(?=\s)"
)
"""A C++ or CUDA file of an op; torch numbers the builds of one op by a version."""


@functools.cache
def _wordings() -> tuple[dict[str, list[re.Pattern[str]]], dict[str, re.Pattern[str]]]:
    """Patterns of settings and of software, by name."""
    table = tomllib.loads(Path(__file__).with_name("wordings.toml").read_text(encoding="utf-8"))
    settings = {name: list(map(re.compile, rows)) for name, rows in table["settings"].items()}
    return settings, {name: re.compile(row) for name, row in table["software"].items()}


class Fact(NamedTuple):
    """A setting that the log states."""

    value: str
    line: int
    text: str


class Loss(NamedTuple):
    """The loss of a step."""

    line: int
    value: float
    digits: int
    """Significant ones that it is printed with."""
    is_left_out: bool = False
    """True where the line has none, which says that it is NaN."""


class Norm(NamedTuple):
    """The gradient norm of a step."""

    line: int
    value: float
    loss: float | None
    """The same step's."""


class Rebuilt(NamedTuple):
    """A file of an op that was compiled a second time."""

    line: int
    evidence: str


class _Build(NamedTuple):
    line: int
    source: str
    version: int
    steps: int

    def is_repeated_by(self, other: _Build) -> bool:
        """Tell another build from that of another machine, which builds its ops once as well."""
        same_host = bool(self.source) and self.source == other.source
        return same_host or other.version > self.version or other.steps > self.steps


class Observed:
    """What a log says of its run."""

    def __init__(self) -> None:
        self.facts: dict[str, Fact] = {}
        """The last word of the log on each setting."""
        self.software: set[str] = set()
        self.num_lines = self.num_progress = 0
        self.num_steps = 0
        self.losses: list[Loss] = []
        self.norms: list[Norm] = []
        """Without those that are not finite of steps that the loss scaler left out."""
        self.rates: list[float] = []
        """Learning rates of the steps that tell them."""
        self.shares: list[tuple[int, float, float]] = []
        """Line, the update's share of an iteration, and its ms."""
        self.rebuilt: list[Rebuilt] = []
        self.overflows = Overflows()
        self.failures = Failures()
        self.log = Log(Path())
        self._of_log = RunFacts(self.log)
        self._position = self._block = self._voice = ""
        self._since_voice = 0
        """Lines of steps of other ranks since the one that is listened to."""
        self._phases: dict[str, float] = {}
        self._built: dict[tuple[str, str], _Build] = {}

    def number(self, name: str) -> float | None:
        """Return a setting as a number; None where the log does not state it as one."""
        try:
            return float(self.facts[name].value) if name in self.facts else None
        except ValueError:
            return None

    @property
    def progress(self) -> int:
        """How many steps the log tells of, by their figures or by DeepSpeed's count alone."""
        return max(self.num_steps, self.num_progress)

    def read(self, lines: Iterable[Line]) -> None:
        """Take all lines of a log."""
        for line in lines:
            self.num_lines = line.number
            if self.overflows.take(line):
                self.software.add("DeepSpeed")
                self.num_progress += 1
            step = read_step(line)
            if step is None:
                self._take_facts(line)
                self._take_build(line)
                self.failures.take(line, self.progress)
                if TIMERS_MARK in line.text and not line.cut:
                    self._take_timers(line)
            elif self._is_new(line, step):
                self._position = step.position
                self._take_step(step)
        self.overflows.finish()
        self._of_log.finish()
        if self.log.world_size:
            self.facts.setdefault("world", Fact(str(self.log.world_size), 0, ""))

    def _is_new(self, line: Line, step: Step) -> bool:
        """Return whether it is no step that is known: bars are drawn again, and ranks say the same.

        Of another rank than the first that told of steps, only a loss that is not finite is new.
        """
        if not self.num_steps or line.source == self._voice or self._since_voice >= _SILENT_LINES:
            self._voice, self._since_voice = line.source, 0
            return not (step.position and step.position == self._position)
        self._since_voice += 1
        return step.loss is not None and not math.isfinite(step.loss)

    def _take_step(self, step: Step) -> None:
        self.software.add(step.framework)
        self.num_steps += 1
        if step.loss is not None:
            self.losses.append(Loss(step.line, step.loss, step.digits, step.is_left_out))
        is_left_out = step.skipped or self.overflows.since_step
        if step.grad_norm is not None and not (is_left_out and not math.isfinite(step.grad_norm)):
            self.norms.append(Norm(step.line, step.grad_norm, step.loss))
        self.overflows.take_step(step.line, skipped=step.skipped)
        if step.learning_rate is not None and math.isfinite(step.learning_rate):
            self.rates.append(step.learning_rate)

    def _take_facts(self, line: Line) -> None:
        text = line.text
        settings, software = _wordings()
        self.software |= {name for name, pattern in software.items() if pattern.search(text)}
        self._of_log.feed(text)
        for name, patterns in settings.items():
            for found in filter(None, (pattern.search(text) for pattern in patterns)):
                self.facts[name] = Fact(found[1], line.number, quoted_line(line))
        # DeepSpeed prints its JSON over several lines; a device is of the block around it.
        if block := _BLOCK.match(text):
            self._block = block[1]
        elif (of_block := _OF_BLOCKS.get(self._block)) and (value := of_block[1].match(text)):
            if value[1] not in ("none", "false"):
                self.facts[of_block[0]] = Fact(value[1], line.number, quoted_line(line))
            self._block = ""

    def _take_build(self, line: Line) -> None:
        if built := _BUILT.search(line.text):
            file, op, version = built.groups()
            build = _Build(line.number, line.source, int(version or 0), self.num_steps)
            first = self._built.setdefault((file, op), build)
            if first.is_repeated_by(build) and first is not build:
                said = f"{op}: {file} is compiled again, after line {first.line}"
                self.rebuilt.append(Rebuilt(line.number, quoted(said, source=line.source)))

    def _take_timers(self, line: Line) -> None:
        """DeepSpeed's timers; older releases print the phases on lines of their own."""
        timers = timer_line(line)
        if timers.problem or not timers.values:
            return
        self.software.add("DeepSpeed")
        self._phases |= timers.values
        if "update_ms" in timers.values:
            parts = [self._phases.get(f"{name}_ms") for name in ("forward", "backward", "update")]
            update_ms, self._phases = self._phases["update_ms"], {}
            if None not in parts and (total := sum(filter(None, parts))):
                self.shares.append((line.number, update_ms / total, update_ms))
