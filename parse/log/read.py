"""Reads a training log. Standard library alone.

A log is walked in four steps: ``lines`` cuts the file, ``entries`` reads each line to its values or
rejects it, ``windows`` puts the lines of an iteration together and ``numbering`` says which one it
is, ``checks`` drops what contradicts itself. Nothing damaged is repaired: it is missing in the
records and listed in ``rejects``.

Forms known: DeepSpeed 0.3 to 0.19 (timers, progress, memory), the old and the new
Megatron-DeepSpeed, the paper's fork, Megatron-LM and megatron-core.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from parse.errors import LogError
from parse.log.checks import drop_contradictions, iteration_seconds
from parse.log.entries import (
    RUN_TOGETHER,
    Damage,
    IterationLine,
    ProgressLine,
    RunStart,
    TimerLine,
    iteration_line,
    timer_line,
)
from parse.log.facts import RunFacts
from parse.log.fields import GLOBAL_STEP, INTERVAL_TIMER, MICRO, PROGRESS, TIMERS_HEAD
from parse.log.lines import MAX_LINE_CHARACTERS, Line, encoding_problem, open_log, read_lines
from parse.log.memory import MemoryReader, check_host, largest_gib, number_memory
from parse.log.metrics import attach_metrics
from parse.log.name import settings_from_name
from parse.log.numbering import count_lost, number_by_lines, number_by_steps
from parse.log.records import PHASES, Iteration, Log, Reject
from parse.log.windows import Entry, Window, group

_MARKS = {
    "iteration": ("consumed samples:", "elapsed_time ", "elapsed time per iteration", "lm loss:"),
    "timers": (TIMERS_HEAD, MICRO + ":", "optimizer_step:"),
    "progress": ("global_step=", ", skipped="),
    "device memory": ("Max_MA",),
    "host memory": ("CPU Virtual",),
}
"""What tells the kind of a line; one with marks of two kinds is two lines run together."""
_SHOWN = 5


def read_log(path: Path) -> Log:
    """Read one log, and the ``metrics.jsonl`` beside it when it is the same run's.

    Damage is never an error: a damaged line is left out, and listed in ``rejects``. The file is
    read line by line, so its size does not matter.

    Args:
        path: The log; its name may carry the run's settings.

    Returns:
        Records in the order of the log, one an iteration.

    Raises:
        LogError: there is no readable file at ``path``.
    """
    log = Log(path=path, settings=settings_from_name(path.name))
    try:
        with open_log(path) as file:
            _read(log, file)
    except FileNotFoundError:
        raise LogError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise LogError(f"{path}: is a folder; give a log") from None
    except OSError as error:
        raise LogError(f"{path}: cannot be read: {error}") from None
    attach_metrics(log)
    return log


def read_usable_log(path: Path) -> Log:
    """Read a log that must hold at least one iteration with a loss.

    Raises:
        LogError: the file is missing, empty, not a log, or cut before its first iteration.
    """
    log = read_log(path)
    if any(record.loss is not None for record in log.iterations):
        return log
    if path.stat().st_size == 0:
        raise LogError(f"{path}: is empty")
    if log.recognised:
        raise LogError(f"{path}: no complete iteration with a loss: cut off, or the run failed")
    if log.rejects and "UTF-16" in log.rejects[0].reason:
        raise LogError(f"{path}: {log.rejects[0].reason}")
    raise LogError(f"{path}: is not a training log: none of its lines is known")


def _read(log: Log, file: io.TextIOWrapper) -> None:
    problem = encoding_problem(file)
    if problem:
        log.rejects.append(Reject.of(1, problem, ""))
        return
    reader = _Reader(log)
    before = ""
    for line in read_lines(file):
        reader.feed(line, before)
        before = line.text
        log.ends_mid_line = line.cut
    reader.finish()


class _Reader:
    """Reads lines to entries, and entries to records."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self.facts = RunFacts(log)
        self.memory = MemoryReader(self.reject)
        self.entries: list[Entry] = []

    def reject(self, number: int, reason: str, text: str) -> None:
        """List a line that is left out."""
        self.log.rejects.append(Reject.of(number, reason, text))

    def feed(self, line: Line, before: str) -> None:
        """Take one line; ``before`` is the text of the one before it."""
        text = line.text
        kinds = [name for name, marks in _MARKS.items() if any(mark in text for mark in marks)]
        if line.overlong:
            self._lose(line, f"a line of over {MAX_LINE_CHARACTERS} characters", kinds)
        elif "\0" in text:
            self._lose(line, "NUL bytes", kinds)
        elif len(kinds) > 1:
            self._lose(line, RUN_TOGETHER, kinds)
        elif kinds == ["iteration"]:
            self._add_iteration(iteration_line(line.number, text, line.cut))
        elif kinds and not line.cut:  # else its iteration is cut off as well
            self._add_other(kinds[0], line, before)
        elif not line.cut and self.facts.feed(text):
            self.entries.append(RunStart())
        if "<TIMER:" in text:
            self._add_interval_timers(line)

    def _lose(self, line: Line, reason: str, kinds: list[str]) -> None:
        """Leave out a line that hides where lines before or behind it end."""
        self.entries.append(Damage())
        if "iteration" in kinds:
            self._add_iteration(IterationLine(line.number, line.text, line.cut, problem=reason))
            self.entries.append(Damage())
        else:
            self.memory.end_pair()
            self.reject(line.number, reason, line.text)

    def _add_iteration(self, line: IterationLine | None) -> None:
        if line:
            self.memory.end_pair()
            self.entries.append(line)

    def _add_other(self, kind: str, line: Line, before: str) -> None:
        if kind == "timers":
            timers = timer_line(line.number, line.text)
            self.entries.append(timers)
        elif kind == "progress":
            steps = [*PROGRESS.finditer(line.text), *GLOBAL_STEP.finditer(line.text)]
            # DeepSpeed prints step 0 before the first iteration.
            self.entries += [
                ProgressLine(int(s[1]), (*s.groups(), None)[1]) for s in steps if int(s[1])
            ]
        elif memory := self.memory.add(line.number, line.text, before):
            self.entries.append(memory)

    def _add_interval_timers(self, line: Line) -> None:
        found = INTERVAL_TIMER.findall(line.text)
        self.entries += [float(seconds) for seconds in found]
        if line.text.count("TIMER:interval-time") > len(found):
            self.reject(line.number, "an interval timer that cannot be read", line.text)

    def finish(self) -> None:
        """Make the records, and say what is missing in them."""
        log = self.log
        log.recognised |= any(not isinstance(e, Damage | RunStart) for e in self.entries)
        *windows, rest = group(self.entries)
        by_lines = any(window.line for window in windows)
        self.facts.finish(trained=bool(windows))
        first_phases = windows[0].phases if windows else {}
        for timers in (entry for entry in self.entries if isinstance(entry, TimerLine)):
            if timers.problem:
                self.reject(timers.number, timers.problem, timers.text)
        if windows:
            number = number_by_lines if by_lines else number_by_steps
            windows = list(number(windows, log, self._drop))
            count_lost(windows)
            drop_contradictions(windows, self._drop, self._drop_timers)
            count_lost(windows)
        if windows and not by_lines:
            log.notes.append("no iteration lines: records are DeepSpeed's timers, without loss")
        counted = [window for window in windows if window.iteration is not None]
        if by_lines and rest.phases and not first_phases and any(w.phases for w in counted):
            # Either this log prints timers behind their iteration line, or it lost its first ones
            # and was cut before its last line.
            log.notes.append("phase times could be of two iterations; left out")
            for window in counted:
                window.phases = {}
        log.memory = self.memory.lines
        for wrong in check_host(log.memory):
            self.reject(wrong.line, "host memory that does not fit the machine's size", "")
        number_memory(counted, log.memory)
        log.iterations = [_record(window, log, len(windows) > 1) for window in counted]
        log.rejects.sort(key=lambda reject: reject.line_number)
        _note_missing(log, counted)

    def _drop(self, window: Window, reason: str) -> None:
        """Leave a window out."""
        window.iteration = None
        line = window.line or window.last_timers
        if line and not (line.problem and line is window.last_timers):
            line.problem = reason
            self.reject(line.number, reason, line.text)

    def _drop_timers(self, window: Window, reason: str) -> None:
        """Leave the timers of a window out."""
        line = window.last_timers
        self.reject(line.number if line else 0, reason, line.text if line else "")
        window.phases, window.micro = {}, {}


def _record(window: Window, log: Log, several: bool) -> Iteration:
    assert window.iteration is not None
    record = Iteration(window.iteration)
    if window.repeats >= window.lost_before:
        # Else they may be of an iteration whose own line is lost.
        for name, value_ms in window.phases.items():
            setattr(record, name, value_ms)
    line = window.line
    if line is None:
        # The slowest rank ends the iteration. One window alone may be of a log that was cut.
        timers = window.interval_timers
        record.iteration_s = max(timers) if several and len(timers) == log.world_size else None
        return record
    record.iteration_s = iteration_seconds(window)
    record.loss = _loss(line)
    for name in ("grad_norm", "learning_rate", "tflops"):
        setattr(record, name, line.real(name))
    record.tokens, record.skipped = line.integer("tokens"), line.integer("skipped")
    record.device_memory_gib, record.host_memory_gib = largest_gib(window)
    return record


def _loss(line: IterationLine) -> float | None:
    """The loss. Megatron prints none that is NaN, nor that of a step the loss scaler skipped."""
    if "loss" in line.values or "skipped" not in line.values:
        return line.real("loss")
    return None if line.integer("skipped") and not line.integer("nan") else float("nan")


def _note_missing(log: Log, counted: Sequence[Window]) -> None:
    """Say which iterations between the first and the last are left out, and which times."""
    numbers = [record.iteration for record in log.iterations]
    step = min((b - a for a, b in pairwise(numbers)), default=1)
    gaps = [(a + step, b - step) for a, b in pairwise(numbers) if b - a > step]
    if gaps:
        shown = ", ".join(f"{a}" if a == b else f"{a} to {b}" for a, b in gaps[:_SHOWN])
        log.notes.append(f"iterations missing: {shown}{', ...' if gaps[_SHOWN:] else ''}")
    for phase in ("iteration", *PHASES):
        without = [r.iteration for r in log.iterations if r.phase_ms(phase) is None]
        if 0 < len(without) < len(numbers):
            shown = ", ".join(map(str, without[:_SHOWN])) + (", ..." if without[_SHOWN:] else "")
            log.notes.append(f"{phase} time missing in iterations: {shown}")
    expected = (log.world_size or 0) * len(counted)
    found = sum(len(window.interval_timers) for window in counted)
    if found and expected and found != expected:
        log.notes.append(
            f"{found} interval timers for {log.world_size} ranks x {len(counted)} iterations"
        )
