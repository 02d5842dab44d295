"""Loss, gradient norm, clipping and loss scale."""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Iterator

from parse.compare.verdict import DEFAULT_VOCABULARY, LossVerdict, judge_loss
from parse.diagnose.illness import Illness
from parse.diagnose.series import Series, Standstill
from parse.diagnose.steps import Step
from parse.diagnose.watcher import Run, Watcher
from parse.log.fields import PROGRESS
from parse.log.lines import Line

_STANDSTILL = ((6, 3), (4, 8), (0, 20))
"""Significant digits of a printed loss, and how many equal ones are no coincidence."""
_FALL_TO_ZERO = 0.05
"""A loss that was above this and is 0 from one step to the next was not learned away."""
_FEWEST_LOSSES = 6
"""Below this, first and last third are too few to tell a direction from noise."""
_STEPS_AT_FULL_RATE = 7
_WAVERS = 0.02
"""Share of itself that a loss moves by from batch to batch."""
_FEWEST_NORMS = 20
_FAR = 20
"""A norm never within this factor of the clip value is not clipped by it."""
_LAST = 20
_FEWEST_OVERFLOWS = 5
_MOST, _SOME = 0.7, 0.2
"""Shares of the last steps: so many mean every step, so many that it was not a bad batch."""


class LossWatcher(Watcher):
    """Loss that is NaN, stands still or rises."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._series, self._still = Series(), Standstill()
        self._nan: Step | None = None
        self._last_finite: float | None = None
        self._digits = 0
        self._first_line = 0
        # Steps since the learning rate last rose; None without rates.
        self._since_rise: int | None = None
        self._highest_rate = -1.0

    def step(self, step: Step) -> None:
        """Take the loss of a step."""
        if step.learning_rate is not None:
            rises = step.learning_rate > self._highest_rate
            self._since_rise = 0 if rises or self._since_rise is None else self._since_rise + 1
            self._highest_rate = max(self._highest_rate, step.learning_rate)
        if step.loss is None:
            return
        self._first_line = self._first_line or step.line
        self._series.add(step.loss)
        if not math.isfinite(step.loss):
            self._nan = self._nan or step
        elif self._nan is None:
            self._last_finite = step.loss
        self._still.add(step.loss, step.line)
        self._digits = max(self._digits, step.digits)

    def illnesses(self) -> Iterator[Illness]:
        """The first that holds: a loss that is NaN also stands still."""
        if self._nan is not None:
            last = f"{self._last_finite:g}" if self._last_finite is not None else "none"
            text = f"the loss is {self._nan.loss} for the first time; the last finite one: {last}"
            yield Illness("loss-nan", self._nan.line, text)
        elif self._is_frozen():
            value, length = self._still.value, self._still.length
            named = judge_loss(enumerate([value] * length), self.run.vocab_sizes).text
            named = named.partition(" from")[0]
            text = f"the loss is {named}: {value} in the last {length} steps"
            yield Illness("loss-frozen", self._still.line, text)
        elif (verdict := self._verdict()).word == "diverged":
            yield Illness("loss-diverging", self._first_line, f"the loss {verdict.text}")
        elif verdict.word == "undecided" and (text := self._flat()):
            yield Illness("loss-frozen", self._first_line, text)

    def _verdict(self) -> LossVerdict:
        enough = len(self._series.kept) >= _FEWEST_LOSSES
        return judge_loss(enumerate(self._series.kept)) if enough else LossVerdict("")

    def _flat(self) -> str:
        """Says of a loss that it only wavers, though it is worse than a guess; else empty.

        A model guesses evenly before it has learned anything, which costs ln(vocabulary); the first
        steps at the full learning rate bring it there at the latest.
        """
        losses, sizes = self._series.kept, [*self.run.vocab_sizes, DEFAULT_VOCABULARY]
        guess, low, high = math.log(sizes[0]), min(losses), max(losses)
        is_warm = self._since_rise is not None and self._since_rise >= _STEPS_AT_FULL_RATE
        if not is_warm or low < guess or high - low > _WAVERS * low:
            return ""
        text = f"the loss stays between {low:.5g} and {high:.5g} for {len(losses)} steps"
        return f"{text}, worse than an even guess: ln({sizes[0]}) = {guess:.5g}"

    def _is_frozen(self) -> bool:
        enough = next(count for digits, count in _STANDSTILL if self._digits >= digits)
        if self._still.length < enough:
            return False
        # A loss that is printed as 0 may just be small; one that fell there at once is not.
        before = self._still.before
        return self._still.value != 0 or before is None or before > _FALL_TO_ZERO

    def not_judged(self) -> Iterator[str]:
        """Without losses, nothing."""
        if not self._series.count:
            text = "whether it learns: no loss that is known here"
            if lines := self.run.num_progress:
                text += f" ({lines} lines of DeepSpeed's own progress); print the loss of each step"
            yield text
        elif self._series.count < _FEWEST_LOSSES:
            yield f"whether the loss falls: {self._series.count} losses are too few"
        elif not any(self.illnesses()) and (verdict := self._verdict()).word == "undecided":
            yield f"whether the loss falls: {verdict.text}"


class NormWatcher(Watcher):
    """Gradient norms that are NaN, and a clip value that always or never bites."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._norms = Series()
        self._last: deque[float] = deque(maxlen=_LAST)
        self._bad_line = 0
        self._smallest, self._largest = math.inf, 0.0
        self._line = 0
        self._zero_loss = False

    def step(self, step: Step) -> None:
        """Take the norm of a step."""
        if step.grad_norm is None:
            return
        self._line = step.line
        self._norms.add(step.grad_norm)
        self._last.append(step.grad_norm)
        if math.isfinite(step.grad_norm):
            self._bad_line = 0
            self._smallest = min(self._smallest, step.grad_norm)
            self._largest = max(self._largest, step.grad_norm)
        else:
            # fp16 starts with a few norms that are not finite, until its scale fits.
            self._bad_line = self._bad_line or step.line
            self._zero_loss |= step.loss == 0

    def illnesses(self) -> Iterator[Illness]:
        """Norms of the end count."""
        bad = [norm for norm in self._last if not math.isfinite(norm)]
        if self._bad_line and 2 * len(bad) >= len(self._last) and len(bad) >= 3:
            more = ", and the loss is printed as 0" if self._zero_loss else ""
            text = f"the gradient norm is {bad[-1]} from here to the end{more}"
            yield Illness("norm-nan", self._bad_line, text)
        elif len(self._norms.kept) >= _FEWEST_NORMS:
            yield from self._clipping()

    def _clipping(self) -> Iterator[Illness]:
        clip = self.run.number("clip")
        if not clip:
            return
        middle = self._norms.median
        count = f"of {len(self._norms.kept)} norms"
        if self._smallest > clip and middle > 2 * clip:
            text = f"clip value {clip:g}, smallest {count} {self._smallest:g}, median {middle:g}"
            yield Illness("clipping-always", self._line, text)
        elif self._largest * _FAR < clip:
            text = f"clip value {clip:g}, largest {count} {self._largest:g}"
            yield Illness("clipping-never", self._line, text)

    def not_judged(self) -> Iterator[str]:
        """Clipping needs norms and the value they are clipped at."""
        if not self._norms.count:
            yield "gradient norms and clipping: no line with a norm"
        elif not self.run.number("clip"):
            yield "clipping: the log does not state the clip value"


class OverflowWatcher(Watcher):
    """A loss scale that falls at every step, or is at its end."""

    words = ("OVERFLOW!", "Current loss scale already", "skipped=", "it/s", "s/it")

    _OVERFLOW = re.compile(
        r"OVERFLOW! (?:Rank \d+ )?Skipping step\."
        r"(?: Attempted loss scale: ([\d.]+)(?:, reducing to ([\d.]+))?| Gradients are non-finite)?"
    )
    _UNSCALED = "Gradients are non-finite"
    _AT_MINIMUM = "Current loss scale already at minimum"
    _SKIPPED = re.compile(r"\bskipped=(\d+)")
    _BAR = re.compile(r"\| *(\d+)/\d+ \[[\d:]+<")

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._count = 0
        self._first = self._latest = (0, "")
        # Of the last steps, whether each overflowed.
        self._steps: deque[bool] = deque(maxlen=_LAST)
        self._open = False
        self._at_minimum: tuple[int, str] | None = None
        self._bar = ""

    def feed(self, line: Line) -> None:
        """Look for the scaler's words and for signs that a step went by."""
        text = line.text
        if found := self._OVERFLOW.search(text):
            self._overflow(line, found[0])
            if found[1] and found[1] == found[2]:
                self._at_minimum = self._at_minimum or (line.number, found[0])
        elif self._AT_MINIMUM in text:
            self._at_minimum = (line.number, self._AT_MINIMUM)
        elif progress := PROGRESS.search(text):
            self.run.software.add("DeepSpeed")
            self._progress(line, int(progress[1]))
        elif (bar := self._BAR.search(text)) and "it" in text:
            # A bar may be drawn again for the same step.
            if self._bar and bar[1] != self._bar:
                self._end_step()
            self._bar = bar[1]

    def step(self, step: Step) -> None:
        """A step went by; Megatron says itself whether it was left out."""
        if step.skipped:
            self._overflow_step(step.line, "number of skipped iterations is not 0")
        elif not self._bar:
            self._end_step()

    def _overflow_step(self, line: int, text: str) -> None:
        if not self._open:
            self._count += 1
            self._first = self._first if self._first[0] else (line, text)
            self._open = True
        self._end_step()

    def _overflow(self, line: Line, text: str) -> None:
        self._count += 1
        self._first = self._first if self._first[0] else (line.number, text)
        self._latest = (line.number, text)
        if self._open:
            self._end_step()
        self._open = True

    def _end_step(self) -> None:
        self._steps.append(self._open)
        self._open = False

    def _progress(self, line: Line, steps: int) -> None:
        """DeepSpeed's own count, which its scaler's words may be missing beside."""
        found = self._SKIPPED.search(line.text)
        if found and steps >= _FEWEST_OVERFLOWS and int(found[1]) >= _MOST * steps:
            if not self._count:
                self._first = (line.number, found[0])
            self._count = max(self._count, int(found[1]))
            self._steps.extend([True] * min(steps, _LAST))

    def illnesses(self) -> Iterator[Illness]:
        """Overflows that the scale gets over are a part of fp16; those at the end are not."""
        if self._open:
            self._end_step()
        share = sum(self._steps) / len(self._steps) if self._steps else 0.0
        if self._at_minimum and share >= _SOME:
            line, text = self._at_minimum
            yield Illness("overflow-every-step", line, f"{text}; {self._count} overflows in all")
        elif self._count >= _FEWEST_OVERFLOWS and share >= _MOST:
            line, text = self._first
            more = f"{sum(self._steps)} of the last {len(self._steps)} steps overflowed"
            if self._UNSCALED in text:
                yield Illness("norm-nan", line, f"{text}; {more}")
                return
            latest = self._latest[1].rpartition(". ")[2]
            text = f"{text}; {more}" + (f", at the end: {latest}" if latest else "")
            yield Illness("overflow-every-step", line, text)
