"""Puts the values of many lines together into one record an iteration. Standard library alone.

Lines of one iteration come before its iteration line. So lines collect in a *window* that the
iteration line closes. DeepSpeed without Megatron prints no iteration lines: there its line of
timers closes the window. Which iteration a window is of is found out in ``numbering``, once all are
known, and what the log contradicts is left out in ``checks``.
"""

from __future__ import annotations

from collections import Counter

from parse.log.checks import drop_contradictions
from parse.log.memory import MemoryReader, check_host
from parse.log.memory_windows import attach_memory, number_memory
from parse.log.numbering import number_windows
from parse.log.records import Iteration, Log, Reject
from parse.log.times import TimeJudge
from parse.log.window import Reading, Window

_SKIPPED = "number of skipped iterations"
_AFTER_LOSS = {
    "loss scale",
    "grad norm",
    "number of nan iterations",
    "samples per second",
    "TFLOPs",
}
"""Labels that stand behind the loss: without one, the line may have ended before it."""


class Assembler:
    """Collects lines into windows, and windows into records."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self.memory = MemoryReader(self._reject_bytes)
        self.windows: list[Window] = []
        self.steps: list[Window] = []
        """Windows closed by a line of timers; kept while the log has no iteration line."""
        self.current = Window(0)
        self.labels: Counter[str] = Counter()
        self.last_fields: Counter[str] = Counter()
        self.timers_lost = False

    @property
    def has_iterations(self) -> bool:
        """Whether any line that ends an iteration was found."""
        return bool(self.windows or self.steps)

    def add_timers(self, seconds: list[float]) -> None:
        """Interval timers of one line, in s."""
        self.log.recognised = True
        after_step = self.steps and not self.windows and not self.current.phases
        target = self.steps[-1] if after_step and not self.current.micro else self.current
        target.timers += seconds

    def lose_timer(self, number: int, text: str) -> None:
        """Note an interval timer that cannot be read."""
        self.timers_lost = True
        self.log.rejects.append(Reject.of(number, "an interval timer without its value", text))

    def add_phases(self, main: dict[str, float], micro: dict[str, float]) -> None:
        """Timers of one line, in ms: the iteration's, and those of one micro-batch."""
        self.log.recognised = True
        window = self.current
        if not window.phases.keys().isdisjoint(main):
            # A timer for the second time: an iteration line was lost, and what is older is its.
            window.phases, window.micro, window.micro_lines = {}, {}, 0
            window.repeats += 1
        window.phases.update(main)
        for name, value in micro.items():
            window.micro[name] = window.micro.get(name, 0.0) + value
        window.micro_lines += bool(micro)
        if not self.windows and main.keys() - {"optimizer_step_ms"}:
            window.by_timers = True
            self.steps.append(window)
            self.current = self._next_window(len(self.steps))

    def add_progress(self, step: int, learning_rate: str | None) -> None:
        """A progress line of DeepSpeed; it prints step 0 before the first."""
        self.log.recognised = True
        if step:
            self.current.steps.append(step)
            self.current.step_rate = learning_rate or self.current.step_rate

    def add_memory(self, number: int, text: bytes, before: bytes) -> None:
        """A line of memory figures."""
        self.log.recognised = True
        current = self.current
        late = bool(current.phases or current.micro or current.steps)
        self.memory.add(number, text, before, self._position(), late)

    def new_run(self) -> None:
        """Note that a run begins here."""
        self.current.new_run = True

    def damage(self, number: int, reason: str, text: str) -> None:
        """Note that lines may be missing here without a trace."""
        self.memory.flush()
        self.current.damaged = True
        self.log.rejects.append(Reject.of(number, reason, text))

    def add_iteration(self, reading: Reading, cut: bool) -> None:
        """Close the window with its iteration line; ``cut`` says that the file ends in it."""
        number, text = reading.line_number, reading.text
        # Of a cut line it must be sure that nothing is missing: the loss may be what was cut off.
        whole = (
            self.labels.keys() <= set(reading.labels) if self.labels else "TFLOPs" in reading.labels
        )
        if cut and not whole:
            self.log.rejects.append(Reject.of(number, "cut off: the log ends here", text))
            return
        self._rejoin_steps()
        self.log.recognised = True
        if reading.twice or len(reading.values) < 3:
            self.log.rejects.append(Reject.of(number, "a damaged iteration line", text))
        else:
            self.current.reading = reading
            self.labels.update(reading.labels)
            if reading.last_field:
                self.last_fields[reading.last_field[0]] += 1
        self.windows.append(self.current)
        self.current = self._next_window(len(self.windows))

    def _next_window(self, index: int) -> Window:
        self.memory.flush()
        return Window(index)

    def _position(self) -> int:
        return len(self.windows) or len(self.steps)

    def _rejoin_steps(self) -> None:
        """The log has iteration lines after all: what timers closed belongs to the first one."""
        steps, self.steps = self.steps, []
        if not steps or self.windows:
            return
        last = steps[-1]
        self.current.phases = self.current.phases or last.phases
        self.current.micro = self.current.micro or last.micro
        self.current.micro_lines = self.current.micro_lines or last.micro_lines
        self.current.repeats += len(steps) - 1 + sum(step.repeats for step in steps)
        self.current.timers = [t for step in steps for t in step.timers] + self.current.timers
        self.current.steps = [n for step in steps for n in step.steps] + self.current.steps
        self.current.step_rate = self.current.step_rate or last.step_rate
        self.current.new_run |= any(step.new_run for step in steps)
        self.current.damaged |= any(step.damaged for step in steps)
        self.current.index = 0
        self.memory.move_to_first_window()

    def finish(self) -> None:
        """Make the records, and tell what does not add up."""
        self.memory.flush()
        memory = self.log.memory = self.memory.lines
        check_host(memory)
        windows = self.windows or self.steps
        lines = bool(self.windows)
        self._take_last_fields()
        if not windows:
            self._timers_alone()
            return
        counted = number_windows(windows, self.log)
        if lines:
            judge = TimeJudge(counted)
            records = [self._record(window, judge) for window in counted]
            self._forget_late_phases(windows, counted, records)
        else:
            # One alone may be of a log that was cut before its first iteration line.
            timed = len(windows) > 1 and not self.timers_lost
            records = [self._step_record(window, timed) for window in counted]
            self.log.notes.append(
                "no iteration lines: records are DeepSpeed's timers, without loss"
            )
        attach_memory(memory, counted, records)
        number_memory(memory, counted, self.current)
        self.log.iterations = records
        drop_contradictions(self.log, counted, records)
        self._count_timers(counted)

    def _take_last_fields(self) -> None:
        """A last field without a bar behind it counts where the writer ends its lines so."""
        for window in self.windows:
            field = window.reading.last_field if window.reading else None
            if window.reading and field and self.last_fields[field[0]] > 1:
                window.reading.values.setdefault(field[1], field[2])
                window.reading.labels.append(field[0])

    def _record(self, window: Window, judge: TimeJudge) -> Iteration:
        reading = window.reading
        assert reading is not None
        assert window.iteration is not None
        seconds, problem = judge.seconds(window)
        if problem:
            self._reject(reading, problem)
        record = Iteration(
            iteration=window.iteration,
            iteration_s=seconds,
            loss=self._loss(reading),
            grad_norm=reading.number("grad_norm"),
            learning_rate=reading.number("learning_rate"),
            tflops=reading.number("tflops"),
            tokens=reading.integer("tokens"),
            skipped=reading.integer("skipped"),
        )
        _attach_phases(record, window)
        return record

    def _step_record(self, window: Window, timed: bool) -> Iteration:
        assert window.iteration is not None
        ranks = self.log.world_size
        whole = timed and bool(ranks) and len(window.timers) == ranks
        # The slowest rank ends the iteration.
        record = Iteration(window.iteration, max(window.timers) if whole else None)
        _attach_phases(record, window)
        return record

    def _loss(self, reading: Reading) -> float | None:
        """The loss; NaN where the writer left it out, as Megatron does, and nobody damaged it."""
        loss = reading.number("loss")
        if loss is not None:
            return loss
        seen = [label for label in reading.labels if self.labels[label] > 1]
        odd = reading.bare_parts or (reading.odd_labels and len(seen) < len(reading.labels))
        complete = not _AFTER_LOSS.isdisjoint(reading.labels) and (
            _SKIPPED in reading.labels or _SKIPPED not in self.labels
        )
        if odd or reading.unreadable or "lm loss" in reading.labels or not complete:
            self._reject(reading, "the loss cannot be read")
            return None
        if reading.integer("skipped") and not reading.integer("nan"):
            return None  # Megatron prints no loss of an iteration that the loss scaler skipped
        return float("nan")

    def _forget_late_phases(
        self, windows: list[Window], counted: list[Window], records: list[Iteration]
    ) -> None:
        if not windows[0].phases and self.current.phases and any(w.phases for w in counted):
            # Either this log prints phases after their iteration line, or it lost its first ones
            # and was cut before its last line: two readings, so neither.
            self.log.notes.append("phase times could be of two iterations; left out")
            for record, window in zip(records, counted, strict=True):
                for name in window.phases:
                    setattr(record, name, None)
                window.phases, window.micro = {}, {}

    def _timers_alone(self) -> None:
        timers, ranks = self.current.timers, self.log.world_size
        if not timers:
            return
        if self.timers_lost or self.current.damaged or not ranks or len(timers) % ranks:
            reason = f"{len(timers)} interval timers do not divide by {ranks} ranks"
            self.log.rejects.append(Reject.of(0, reason, ""))
            return
        self.log.iterations = [
            Iteration(iteration=i // ranks + 1, iteration_s=max(timers[i : i + ranks]))
            for i in range(0, len(timers), ranks)
        ]
        self.log.notes.append("no iteration lines: times are the slowest rank's interval timer")

    def _count_timers(self, counted: list[Window]) -> None:
        expected = (self.log.world_size or 0) * len(counted)
        found = sum(len(window.timers) for window in counted)
        if found and expected and found != expected:
            self.log.notes.append(
                f"{found} interval timers for {self.log.world_size} ranks x "
                f"{len(counted)} iterations"
            )

    def _reject(self, reading: Reading, reason: str) -> None:
        self.log.rejects.append(Reject.of(reading.line_number, reason, reading.text))

    def _reject_bytes(self, number: int, reason: str, text: bytes) -> None:
        self.log.rejects.append(Reject.of(number, reason, text.decode(errors="replace")))


def _attach_phases(record: Iteration, window: Window) -> None:
    """Phases of the window, unless they may be of an iteration whose own line was lost.

    They are this iteration's only if every lost one has left its own before them.
    """
    if window.repeats >= window.lost_before:
        for name, value in window.phases.items():
            setattr(record, name, value)
    else:
        window.phases, window.micro = {}, {}
