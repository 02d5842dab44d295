"""Puts the values of many lines together into one record an iteration."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields

from parse.records import Iteration, Log, Reject

_PHASE_FIELDS = {field.name for field in fields(Iteration)}


@dataclass(frozen=True)
class Reading:
    """What one iteration line says."""

    line_number: int
    text: str
    values: Mapping[str, str]
    """Text of each field found."""
    integers: Mapping[str, int]
    loss: float | None


class Assembler:
    """Collects what comes before an iteration line and attaches it to that iteration.

    Lines of one iteration come before its iteration line. Interval timers come one a rank and
    without its name: the one that rounds to what the iteration line prints is the printing rank's,
    which needs no counting of ranks and survives timers that are lost. Only a log without any
    iteration line has its timers grouped by the number of ranks.
    """

    def __init__(self, log: Log) -> None:
        self.log = log
        self.timers: list[float] = []
        self.all_timers: list[float] = []
        self.phases: dict[int, dict[str, float]] = {}
        self.memory: dict[str, float] = {}
        self.repeats = 0

    def add_timers(self, seconds: list[float]) -> None:
        """Interval timers of one line, in s."""
        self.log.recognised = True
        self.timers += seconds
        self.all_timers += seconds

    def add_phases(self, milliseconds: dict[str, float]) -> None:
        """Phase timers of one line, in ms."""
        if not milliseconds:
            return
        self.log.recognised = True
        window = self.phases.setdefault(len(self.log.iterations), {})
        if not window.keys().isdisjoint(milliseconds):
            # A timer for the second time: an iteration line was lost, and what is older is its.
            window.clear()
            self.repeats += 1
        window.update(milliseconds)

    def add_memory(self, gib: Mapping[str, str]) -> None:
        """Memory of one line, in GiB; an iteration keeps the largest."""
        self.log.recognised = self.log.recognised or bool(gib)
        for name, text in gib.items():
            self.memory[name] = max(self.memory.get(name, 0.0), float(text))

    def add_iteration(self, reading: Reading) -> None:
        """Close an iteration with its line."""
        self.log.recognised = True
        number = self._number(reading)
        if number is None:
            self._reject(reading, "an iteration that was printed before")
            return
        self._forget_lost(number)
        text = reading.values
        record = Iteration(
            iteration=number,
            iteration_s=self._seconds(reading),
            loss=reading.loss,
            grad_norm=_float(text.get("grad_norm")),
            learning_rate=_float(text.get("learning_rate")),
            tflops=_float(text.get("tflops")),
            tokens=reading.integers.get("tokens"),
            skipped=reading.integers.get("skipped"),
        )
        for name, value in self.memory.items():
            setattr(record, name, value)
        self.log.iterations.append(record)
        self.timers, self.memory, self.repeats = [], {}, 0

    def _forget_lost(self, number: int) -> None:
        """Drop what may be of an iteration whose own line was lost.

        Phases are this iteration's only if every lost one has left its own before them.
        """
        records = self.log.iterations
        lost = number - (records[-1].iteration if records else 0) - 1
        if lost > 0:
            self.memory = {}
        if self.repeats < lost:
            self.phases.pop(len(records), None)

    def finish(self) -> None:
        """Attach the phases, and tell what does not add up."""
        log = self.log
        if not log.iterations:
            self._timers_alone()
        windows = self._windows()
        for index, record in enumerate(log.iterations):
            for name, value in windows.get(index, {}).items():
                if name in _PHASE_FIELDS:
                    setattr(record, name, value)
        expected = (log.world_size or 0) * len(log.iterations)
        if self.all_timers and expected and len(self.all_timers) != expected:
            log.notes.append(
                f"{len(self.all_timers)} interval timers for {log.world_size} ranks x "
                f"{len(log.iterations)} iterations"
            )

    def _windows(self) -> dict[int, dict[str, float]]:
        """Phases by position of their iteration; none where they could be the next one's."""
        count = len(self.log.iterations)
        if count and 0 not in self.phases and count in self.phases:
            # Either this log prints phases after their iteration line, or it lost its first ones
            # and was cut before its last line: two readings, so neither.
            self.log.notes.append("phase times could be of two iterations; left out")
            return {}
        return self.phases

    def _number(self, reading: Reading) -> int | None:
        """Number of the iteration; None when the line repeats the one before.

        The samples consumed give it, where samples, tokens and batch agree; so an iteration line
        that was lost leaves a gap rather than a shift.
        """
        records = self.log.iterations
        previous = records[-1].iteration if records else 0
        number = _stated_number(reading.integers)
        if number is None:
            return previous + 1
        if number == previous:
            return None
        if number < previous:
            self._start_anew(number)
        return number

    def _start_anew(self, number: int) -> None:
        self.log.notes.append(f"the log starts anew at iteration {number}; the last run counts")
        window = self.phases.get(len(self.log.iterations))
        self.phases = {} if window is None else {0: window}
        self.log.iterations.clear()
        self.all_timers = list(self.timers)

    def _seconds(self, reading: Reading) -> float | None:
        """The iteration's time in s: a timer where one rounds to the printed time."""
        printed = [
            _Printed.of(reading.values.get("elapsed_s"), 1.0),
            _Printed.of(reading.values.get("elapsed_ms"), 1e-3),
        ]
        known = [p for p in printed if p is not None]
        if len(known) == 2 and not known[0].agrees(known[1]):
            known = [p for p in known if p.nearest(self.timers) is not None]
            if len(known) != 1:
                self._reject(reading, "two times that do not agree")
                return None
        if not known:
            self._reject(reading, "no time that can be read")
            return None
        timer = known[0].nearest(self.timers)
        return known[0].seconds if timer is None else timer

    def _timers_alone(self) -> None:
        timers, ranks = self.all_timers, self.log.world_size
        if not timers:
            return
        if not ranks or len(timers) % ranks:
            self.log.rejects.append(
                Reject.of(0, f"{len(timers)} interval timers do not divide by {ranks} ranks", "")
            )
            return
        # The slowest rank ends the iteration.
        self.log.iterations = [
            Iteration(iteration=i // ranks + 1, iteration_s=max(timers[i : i + ranks]))
            for i in range(0, len(timers), ranks)
        ]
        if len(self.log.iterations) > 1:
            self.phases = {}
        self.log.notes.append("no iteration lines: times are the slowest rank's interval timer")

    def _reject(self, reading: Reading, reason: str) -> None:
        self.log.rejects.append(Reject.of(reading.line_number, reason, reading.text))


@dataclass(frozen=True)
class _Printed:
    """A printed time, and how far its rounding can be off; in s."""

    seconds: float
    rounding_s: float

    @classmethod
    def of(cls, text: str | None, unit_s: float) -> _Printed | None:
        if text is None:
            return None
        value = float(text) * unit_s
        if not math.isfinite(value) or value <= 0:
            return None
        decimals = len(text.partition(".")[2]) if "e" not in text.lower() else 3
        return cls(value, 0.51 * unit_s * 10.0**-decimals + 1e-12)

    def agrees(self, other: _Printed) -> bool:
        return abs(self.seconds - other.seconds) <= self.rounding_s + other.rounding_s

    def nearest(self, timers: list[float]) -> float | None:
        close = [t for t in timers if abs(t - self.seconds) <= self.rounding_s]
        return min(close, key=lambda t: abs(t - self.seconds), default=None)


def _stated_number(values: Mapping[str, int]) -> int | None:
    """Iteration that the line states; None when it does not, or contradicts itself."""
    stated = {values.get("iteration"), _number_from_samples(values)} - {None, 0}
    return stated.pop() if len(stated) == 1 else None


def _number_from_samples(values: Mapping[str, int]) -> int | None:
    samples, batch = values.get("samples"), values.get("global_batch_size")
    if not samples or not batch or samples % batch:
        return None
    tokens, length = values.get("tokens"), values.get("seq_length")
    consistent = tokens is not None and length is not None and tokens == samples * length
    return samples // batch if consistent else None


def _float(text: str | None) -> float | None:
    return None if text is None else float(text)
