"""What a loss scaler says, and how many of the last steps it left out."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator

from parse.illnesses import Illness
from parse.lines import Line
from parse.log import PATTERNS

GOES_ON_STEPS = 3
"""A run that does so many good steps after an error was not ended by it."""
_LAST = 20
_FEWEST_OVERFLOWS = 5
_MOST, _SOME = 0.7, 0.2
"""Shares of the last steps: so many mean every step, so many that it was not a bad batch."""
_SCALE = r"[\d.]+(?:e[-+]?\d+)?"
_OVERFLOW = re.compile(
    r"(?P<words>(?i:overflow!)|Overflow detected\.|Grad overflow on iteration \d+|"
    r"Gradient overflow\.|gradient overflow detected)"
    r"(?:\s+(?:Rank \d+ )?Skipping step[.,])?"
    rf"(?: Attempted loss scale: (?P<from>{_SCALE}),?(?: reducing to (?P<to>{_SCALE}))?"
    rf"| loss scaler \d+ reducing loss scale to (?P<apex>{_SCALE})"
    rf"|, ignoring gradient, setting loss scale to: (?P<fairseq>{_SCALE})"
    r"| Gradients are non-finite)?"
)
"""DeepSpeed's since 0.4 and before it, apex's and fairseq's."""
_REDUCED = re.compile(rf"Reducing \w+ loss scale from ({_SCALE}) to ({_SCALE})")
_SKIPPED = re.compile(r"\bskipped=(\d+)")
_OLD_TIMER = re.compile(r"\b\d+/\d+, SamplesPerSec=")
_TQDM = re.compile(r"\| *(\d+)/\d+ \[[\d:]+<")


class Overflows:
    """Counts the steps that the loss scaler left out, and those that it did not.

    Steps are seen as lines of their own, as moves of a progress bar, or only in DeepSpeed's own
    count of them, ``step=N, skipped=M``.
    """

    def __init__(self) -> None:
        self.since_step = False
        """True where the scaler said of an overflow since the last line of a step."""
        self._said: list[tuple[int, str]] = []
        """Line and words of each."""
        self._recent: deque[bool] = deque(maxlen=_LAST)
        """True for each of the last steps that overflowed."""
        self._at_minimum: tuple[int, str] | None = None
        self._is_open = False
        self._voice = self._scale = self._bar = ""
        self._steps = self._skips = 0
        """Counted since DeepSpeed last said how many there were in all."""
        self._total: tuple[int, int] | None = None
        self._quiet = self._longest_quiet = 0
        """Lines of the old timer since an overflow, and how many there were between two."""

    def take(self, line: Line) -> bool:
        """Take a line; return whether DeepSpeed says in it how far training is."""
        text = line.text
        progress = PATTERNS["progress"].search(text)
        counted = progress or PATTERNS["global_step"].search(text)
        if found := _OVERFLOW.search(text):
            self._take_words(line, found)
        elif (reduced := _REDUCED.search(text)) and self._said:
            self._take_scale(line, reduced[0], *reduced.groups())
        elif counted:
            skipped = int(_SKIPPED.findall(text)[0]) if progress else None
            self._take_count(line, int(counted[1]), skipped)
        elif _OLD_TIMER.search(text):
            self._quiet += 1
        elif ("it/s" in text or "s/it" in text) and (bar := _TQDM.search(text)):
            # A bar may be drawn again for the same step.
            if self._bar and bar[1] != self._bar:
                self.end_step()
            self._bar = bar[1]
        return counted is not None

    def take_step(self, line: int, *, skipped: bool) -> None:
        """Take a step that a line of its own tells of; Megatron says whether it was left out."""
        if skipped:
            if not self._is_open:
                self._open(line, "number of skipped iterations is not 0")
            self.end_step()
        elif not self._bar:
            self.end_step()
        self.since_step = False

    def end_step(self) -> None:
        """End a step, which overflowed where the scaler said so since the one before."""
        self._recent.append(self._is_open)
        self._steps += 1
        self._is_open = False

    def finish(self) -> None:
        """End the step that the last words are of."""
        if self._is_open:
            self.end_step()

    def _open(self, line: int, text: str) -> None:
        self._said.append((line, text))
        self._skips += 1
        self._is_open = True

    def _take_words(self, line: Line, found: re.Match[str]) -> None:
        scale = found["to"] or found["apex"] or found["fairseq"]
        # One overflow may be told in several ways, and by every rank: the first voice counts.
        voice = line.source + re.sub(r"\d", "", found["words"])
        self._voice = self._voice or voice
        if voice == self._voice:
            if self._is_open:
                self.end_step()
            self._open(line.number, found[0])
            self._longest_quiet, self._quiet = max(self._longest_quiet, self._quiet), 0
            self.since_step = True
        if scale:
            self._take_scale(line, found[0], found["from"], scale)

    def _take_scale(self, line: Line, said: str, before: str | None, after: str) -> None:
        self._scale = after
        if before == after:
            self._at_minimum = self._at_minimum or (line.number, said)

    def _take_count(self, line: Line, steps: int, skipped: int | None) -> None:
        if self._is_open:
            self.end_step()
        is_first = self._total is None
        old_steps, old_skipped = self._total or (0, 0)
        if steps < old_steps:  # another run in the same log
            old_steps = old_skipped = 0
        skipped = old_skipped + self._skips if skipped is None else skipped
        unheard = max(skipped - old_skipped - self._skips, 0)
        good = max(steps - old_steps - self._steps - unheard, 0)
        # Of a run that was resumed, what this log does not tell of came before it.
        if not (is_first and unheard and self._skips):
            self._said += [(line.number, f"skipped={skipped}")] * unheard
            self._recent.extend([True] * min(unheard, _LAST) + [False] * min(good, _LAST))
        self._total, self._steps, self._skips = (steps, skipped), 0, 0

    def illnesses(self) -> Iterator[Illness]:
        """Overflows that the scale gets over are a part of fp16; those at the end are not."""
        count, steps = len(self._said), len(self._recent)
        share = sum(self._recent) / steps if steps else 0.0
        if self._at_minimum and share >= _SOME:
            line, text = self._at_minimum
            yield Illness("overflow-every-step", line, f"{text}; {count} overflows in all")
        elif count >= _FEWEST_OVERFLOWS and share >= _MOST and not self._got_over():
            line, text = self._said[0]
            more = f"{sum(self._recent)} of the last {steps} steps overflowed"
            if "Gradients are non-finite" in text:
                yield Illness("norm-nan", line, f"{text}; {more}")
                return
            more += f", at the end: reducing to {self._scale}" if self._scale else ""
            yield Illness("overflow-every-step", line, f"{text}; {more}")

    def _got_over(self) -> bool:
        last = list(self._recent)[-GOES_ON_STEPS:]
        return not any(last) or self._quiet >= GOES_ON_STEPS + 2 * self._longest_quiet
