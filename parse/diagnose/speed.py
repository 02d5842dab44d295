"""An update that takes most of the time."""

from __future__ import annotations

from collections.abc import Iterator

from parse.diagnose.illness import Illness
from parse.diagnose.series import Series
from parse.diagnose.watcher import Run, Watcher
from parse.log.entries import timer_line
from parse.log.fields import TIMERS_HEAD
from parse.log.lines import Line

_FEWEST = 3
_WARMUP = 1
_HALF = 0.5


class StepShareWatcher(Watcher):
    """The share of DeepSpeed's ``step`` timer in an iteration."""

    words = (TIMERS_HEAD,)

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._shares, self._updates = Series(), Series()
        self._first_line = 0
        self._phases: dict[str, float] = {}

    def feed(self, line: Line) -> None:
        """Take a line of timers; older releases print the phases on lines of their own."""
        if line.cut or line.overlong:
            return
        timers = timer_line(line.number, line.text)
        if timers.problem or not timers.main:
            return
        self.run.software.add("DeepSpeed")
        self._phases |= timers.main
        if "update_ms" not in timers.main:
            return
        phases, self._phases = self._phases, {}
        parts = [phases.get(f"{name}_ms") for name in ("forward", "backward", "update")]
        if None in parts or not (total := sum(filter(None, parts))):
            return
        self._first_line = self._first_line or line.number
        self._shares.add(phases["update_ms"] / total)
        self._updates.add(phases["update_ms"])

    def illnesses(self) -> Iterator[Illness]:
        """The median tells; the first iteration sets up."""
        if self._shares.count < _FEWEST + _WARMUP:
            return
        shares, updates = Series(), Series()
        for share, update in zip(
            self._shares.kept[_WARMUP:], self._updates.kept[_WARMUP:], strict=True
        ):
            shares.add(share)
            updates.add(update)
        if shares.median > _HALF:
            text = f"step takes {shares.median:.0%} of forward, backward and step"
            text += f" (medians of {self._shares.count - _WARMUP}: {updates.median:.0f} ms a step)"
            yield Illness("step-over-half", self._first_line, text)

    def not_judged(self) -> Iterator[str]:
        """Only DeepSpeed's timers tell."""
        if self._shares.count < _FEWEST + _WARMUP:
            yield "the share of the optimizer step: no timers (wall_clock_breakdown: true)"
