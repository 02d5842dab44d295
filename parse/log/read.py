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
    IterationLine,
    LabelledLine,
    Mark,
    ProgressLine,
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
from parse.log.throughput import MARK as THROUGHPUT, ProfileReader, throughput_line
from parse.log.windows import Entry, Window, group, reject_odd_timers

_MARKS = {
    TIMERS_HEAD: "timers",
    "global_step=": "progress",
    ", skipped=": "progress",
    "Max_MA": "memory",
    "CPU Virtual": "memory",
}
"""What tells the kind of a line; where two of them stand, two lines have run together."""
_ITERATION_MARKS = ("consumed samples:", "elapsed_time ", "elapsed time per iteration", "lm loss:")
_TIMER_MARKS = (MICRO + ":", "optimizer_step:")
"""What tells a line of timers whose beginning is damaged."""
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


def _kinds(text: str) -> list[str]:
    """The kind of a line; none for one that does not matter, several for lines run together."""
    kinds = [kind for mark, kind in _MARKS.items() for _ in range(text.count(mark))]
    if any(mark in text for mark in _ITERATION_MARKS):
        return [*kinds, "iteration"]
    return kinds or (["timers"] if any(mark in text for mark in _TIMER_MARKS) else [])


def _damage(line: Line, kinds: Sequence[str]) -> str:
    """Why nothing of a line can be used; empty for a line that looks sound."""
    if line.overlong:
        return f"a line of over {MAX_LINE_CHARACTERS} characters"
    if "\0" in line.text:
        return "NUL bytes"
    return RUN_TOGETHER if len(kinds) > 1 else ""


class _Reader:
    """Reads lines to entries, and entries to records."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self.facts = RunFacts(log)
        self.memory = MemoryReader(self.reject)
        self.profile = ProfileReader()
        self.entries: list[Entry] = []

    def reject(self, number: int, reason: str, text: str) -> None:
        """List a line that is left out."""
        self.log.rejects.append(Reject.of(number, reason, text))

    def feed(self, line: Line, before: str) -> None:
        """Take one line; ``before`` is the text of the one before it."""
        text = line.text
        kinds = _kinds(text)
        damage = _damage(line, kinds)
        if damage:
            self._lose(line, damage, "iteration" in kinds)
        elif kinds == ["iteration"]:
            self._add_iteration(iteration_line(line.number, text, line.cut))
        elif line.cut:  # the iteration that it belongs to is cut off as well
            return
        elif kinds == ["timers"]:
            self.entries.append(timer_line(line.number, text))
        elif kinds == ["progress"]:
            self._add_progress(line)
        elif kinds == ["memory"]:
            self.entries += self.memory.add(line.number, text, before)
        elif not self.profile.feed(line.number, text) and self.facts.feed(text):
            self.entries.append(Mark.RUN_START)
        if "<TIMER:" in text:
            timers = INTERVAL_TIMER.findall(text)
            self.entries += map(float, timers)
            if text.count("TIMER:interval-time") > len(timers) and not damage:
                self.reject(line.number, "an interval timer that cannot be read", text)

    def _add_progress(self, line: Line) -> None:
        if THROUGHPUT in line.text:
            if throughput := throughput_line(line.number, line.text):
                self.log.throughput.append(throughput)
            else:
                self.reject(line.number, "a throughput line that cannot be read", line.text)
        found = PROGRESS.search(line.text) or GLOBAL_STEP.search(line.text)
        if found and int(found[1]):  # DeepSpeed prints step 0 before the first iteration
            rate = found[2] if found.re is PROGRESS else None
            self.entries.append(ProgressLine(int(found[1]), rate))
        elif not found and ", skipped=" in line.text:
            self.reject(line.number, "a progress line that cannot be read", line.text)

    def _add_iteration(self, line: IterationLine | None) -> None:
        if line:
            self.memory.end_pair()
            self.entries.append(line)
            if line.problem:
                self.reject(line.number, line.problem, line.text)

    def _lose(self, line: Line, damage: str, ends_iteration: bool) -> None:
        """Leave out a line that hides where the lines around it begin and end."""
        self.entries.append(Mark.LINES_LOST)
        if ends_iteration:
            self._add_iteration(IterationLine(line.number, line.text, damage))
            self.entries.append(Mark.LINES_LOST)
        else:
            self.memory.end_pair()
            self.reject(line.number, damage, line.text)

    def finish(self) -> None:
        """Make the records, and say what is missing in them."""
        log, entries = self.log, self.entries
        log.recognised |= any(not isinstance(entry, Mark) for entry in entries)
        timers = [entry for entry in entries if isinstance(entry, TimerLine)]
        reject_odd_timers(timers)
        for line in timers:
            if line.problem:
                self.reject(line.number, line.problem, line.text)
        *windows, rest = group(entries)
        self.facts.finish(trained=bool(windows))
        check_host(self.memory.lines, self.reject)
        if windows:
            counted = self._number(windows, rest)
            number_memory(counted, self.memory.lines)
            log.iterations = [_record(window, log) for window in counted]
            _note_missing(log, counted)
        log.memory, log.profile = self.memory.lines, self.profile.lines
        log.rejects.sort(key=lambda reject: reject.line_number)

    def _number(self, windows: Sequence[Window], rest: Window) -> list[Window]:
        """The windows that make a record, their iteration set; ``rest`` is the open one."""
        log, first, by_lines = self.log, windows[0], any(window.line for window in windows)
        if not by_lines:
            log.notes.append("no iteration lines: records are DeepSpeed's timers, without loss")
        number = number_by_lines if by_lines else number_by_steps
        windows = number(windows, log, self._drop)
        count_lost(windows)
        drop_contradictions(windows, self._drop, self._drop_timers)
        count_lost(windows)
        counted = [window for window in windows if window.iteration is not None]
        if by_lines and rest.phases and not first.phases and any(w.phases for w in counted):
            # Either this log prints timers behind their iteration line, or it lost its first ones
            # and was cut before its last line.
            log.notes.append("phase times could be of two iterations; left out")
            for window in counted:
                window.phases = {}
        if len(windows) == 1 and not by_lines:
            first.interval_timers = []  # the log may be cut before its first iteration line
        return counted

    def _drop(self, window: Window, reason: str) -> None:
        """Leave a window out."""
        window.iteration = None
        self._leave_out(window.line or window.last_timers, reason)

    def _drop_timers(self, window: Window, reason: str) -> None:
        """Leave the timers of a window out."""
        window.phases, window.micro = {}, {}
        self._leave_out(window.last_timers, reason)

    def _leave_out(self, line: LabelledLine | None, reason: str) -> None:
        if line and not line.problem:
            line.problem = reason
            self.reject(line.number, reason, line.text)


def _record(window: Window, log: Log) -> Iteration:
    assert window.iteration is not None
    record, line = Iteration(window.iteration), window.line
    if window.repeats >= window.lost_before:
        # Else they may be of an iteration whose own line is lost.
        for name, value_ms in window.phases.items():
            setattr(record, name, value_ms)
    if line is None:
        # The slowest rank ends the iteration.
        timers = window.interval_timers
        record.iteration_s = max(timers) if timers and len(timers) == log.world_size else None
        return record
    record.iteration_s = iteration_seconds(window)
    record.loss = line.loss
    for name in ("grad_norm", "learning_rate", "tflops"):
        setattr(record, name, line.real(name))
    record.tokens, record.skipped = line.integer("tokens"), line.integer("skipped")
    record.device_memory_gib, record.host_memory_gib = largest_gib(window)
    return record


def _note_missing(log: Log, counted: Sequence[Window]) -> None:
    """Say which iterations between the first and the last are left out, and which times."""
    numbers = [record.iteration for record in log.iterations]
    step = min((b - a for a, b in pairwise(numbers)), default=1)
    gaps = [(a + step, b - step) for a, b in pairwise(numbers) if b - a > step]
    _note(log, "iterations missing", [f"{a}" if a == b else f"{a} to {b}" for a, b in gaps])
    for phase in ("iteration", *PHASES):
        without = [f"{r.iteration}" for r in log.iterations if r.phase_ms(phase) is None]
        if len(without) < len(numbers):
            _note(log, f"{phase} time missing in iterations", without)
    expected = (log.world_size or 0) * len(counted)
    found = sum(len(window.interval_timers) for window in counted)
    if found and expected and found != expected:
        log.notes.append(
            f"{found} interval timers for {log.world_size} ranks x {len(counted)} iterations"
        )


def _note(log: Log, what: str, iterations: Sequence[str]) -> None:
    if iterations:
        more = ", ..." if len(iterations) > _SHOWN else ""
        log.notes.append(f"{what}: {', '.join(iterations[:_SHOWN])}{more}")
