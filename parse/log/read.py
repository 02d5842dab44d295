"""Reads a log: finds the lines that matter, and what they say. Standard library alone.

``line_scan`` finds the lines that hold a marker; only they are decoded. ``fields`` has the table of
what may stand in them. Forms known: DeepSpeed 0.3 to 0.19 (timers, progress, memory), the old and
the new Megatron-DeepSpeed, the paper's fork, Megatron-LM and megatron-core.
"""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

from parse.errors import LogError
from parse.log.assemble import Assembler
from parse.log.facts import FACT_MARKERS, RunFacts
from parse.log.fields import GLOBAL_STEP, INTERVAL_TIMER, MICRO, PROGRESS, TIMERS_HEAD
from parse.log.line_scan import MAX_LINE_BYTES, RawLine, encoding_problem, ends_mid_line, scan
from parse.log.line_values import has_lost_timer, iteration_readings, phase_values, split_line
from parse.log.metrics import attach_metrics
from parse.log.name import settings_from_name
from parse.log.records import Log, Reject
from parse.log.window import Reading

_MEMORY, _TIMER, _PHASES, _ITERATION, _PROGRESS, _FACT, _NUL = (1 << bit for bit in range(7))
_MARKERS = {
    **dict.fromkeys((b"Max_MA", b"CPU Virtual"), _MEMORY),
    **dict.fromkeys((b"interval-time", b"<TIMER:interv"), _TIMER),
    **dict.fromkeys((b"time (ms) |", b"_microstep:", b"optimizer_step:"), _PHASES),
    **dict.fromkeys((b"elapsed", b"consumed samples", b"lm loss"), _ITERATION),
    **dict.fromkeys((b"global_step=", b", skipped="), _PROGRESS),
    **dict.fromkeys(FACT_MARKERS, _FACT),
    b"\0": _NUL,
}


def read_log(path: Path) -> Log:
    """Read one log, and the ``metrics.jsonl`` beside it when it is the same run's.

    Damage is never an error: what cannot be read is absent, and listed in ``rejects``. The file is
    read in blocks, so that its size does not matter.

    Args:
        path: The log; its name may carry the run's settings.

    Returns:
        Records in the order of the log, one an iteration.

    Raises:
        LogError: there is no readable file at ``path``.
    """
    log = Log(path=path, settings=settings_from_name(path.name))
    try:
        with path.open("rb") as file:
            _read(log, file)
    except FileNotFoundError:
        raise LogError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise LogError(f"{path}: is a folder; give a log") from None
    except (OSError, ValueError) as error:
        raise LogError(f"{path}: cannot be read: {error}") from None
    attach_metrics(log)
    return log


def _read(log: Log, file: BinaryIO) -> None:
    problem = encoding_problem(file)
    if problem:
        log.rejects.append(Reject.of(1, problem, ""))
        return
    reader = _Reader(log)
    for line in scan(file, _MARKERS, _MEMORY):
        reader.feed(line)
    log.ends_mid_line = ends_mid_line(file)
    reader.facts.finish(trained=reader.assembler.has_iterations)
    reader.assembler.finish()


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


class _Reader:
    """Sorts lines by marker, and hands what they hold to the assembler."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self.assembler = Assembler(log)
        self.facts = RunFacts(log)

    def feed(self, line: RawLine) -> None:
        """Take one line that holds a marker."""
        number, kinds, raw = line.number, line.kinds, line.text
        if line.overlong:
            self.assembler.damage(number, f"a line of over {MAX_LINE_BYTES} bytes", "")
            return
        if kinds & _NUL:
            self._zeros(number, kinds, raw.decode(errors="replace"))
            return
        if kinds == _MEMORY:
            self.assembler.add_memory(number, raw, line.before)
            return
        # Figures of memory that are run together with an iteration line are of before or behind it.
        late = kinds & _MEMORY and raw.find(b"elapsed") < raw.find(b" GB")
        if kinds & _MEMORY and not late:
            self.assembler.add_memory(number, raw, line.before)
        text = raw.decode(errors="replace")
        if kinds & _TIMER:
            text = self._timers(number, text)
        self._text(number, kinds, text, line.cut)
        if late:
            self.assembler.add_memory(number, raw, line.before)

    def _text(self, number: int, kinds: int, text: str, cut: bool) -> None:
        if not kinds & _ITERATION:
            if not cut:  # the iteration it belongs to is cut off as well
                self._whole_line(number, kinds, text)
            return
        head, body, tail = split_line(text)
        if head:
            self._whole_line(number, kinds, head)
        for reading in iteration_readings(number, body, cut):
            self.assembler.add_iteration(reading, cut)
        if tail and not cut:
            self._whole_line(number, kinds, tail)

    def _zeros(self, number: int, kinds: int, text: str) -> None:
        """A line with NUL bytes, as a power cut leaves them: its two ends may be of two lines."""
        self.assembler.damage(number, "NUL bytes", text)
        if kinds & _ITERATION:
            self.assembler.add_iteration(Reading(number, text, {}, [], twice=True), cut=False)
            self.assembler.current.damaged = True
        self.assembler.timers_lost |= bool(kinds & _TIMER)

    def _whole_line(self, number: int, kinds: int, text: str) -> None:
        """What is not read from a line that the file ends in."""
        if kinds & _PHASES and (TIMERS_HEAD in text or MICRO in text or "optimizer_step" in text):
            self._phases(number, text)
        if kinds & _PROGRESS:
            for progress in PROGRESS.finditer(text):
                self.assembler.add_progress(int(progress[1]), progress[2])
            for step in GLOBAL_STEP.finditer(text):
                self.assembler.add_progress(int(step[1]), None)
        if kinds & _FACT and self.facts.feed(text):
            self.assembler.new_run()

    def _timers(self, number: int, text: str) -> str:
        """Collect every interval timer of the line; returns the line without any of them."""
        found = [float(value) for value in INTERVAL_TIMER.findall(text)]
        text = INTERVAL_TIMER.sub("", text)
        if found:
            self.assembler.add_timers(found)
        if has_lost_timer(text):
            self.assembler.lose_timer(number, text)
        return text

    def _phases(self, number: int, text: str) -> None:
        found = phase_values(text)
        for values in found:
            if values.main or values.micro:
                self.assembler.add_phases(values.main, values.micro)
        if not found or any(values.damaged for values in found):
            reason = "a timer line with values that cannot be read"
            self.log.rejects.append(Reject.of(number, reason, text))
