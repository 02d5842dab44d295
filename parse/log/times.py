"""How long an iteration took, by all that a log says of it. Standard library alone.

The paper's fork prints a timer of each rank in full precision, and on the iteration line the
printing rank's in s and in ms; Megatron prints ms alone. Samples per second say it once more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from parse.log.window import Reading, Window

_SAME_TIME_S = 2e-6
"""Two timers this close are the same time for any purpose."""
_UNITS = (("elapsed_s", 1.0), ("interval_s", 1.0), ("elapsed_ms", 1e-3))


@dataclass(frozen=True)
class _Printed:
    """A printed time, and how far its rounding can be off; in s."""

    seconds: float
    rounding_s: float

    def agrees(self, other: _Printed) -> bool:
        return abs(self.seconds - other.seconds) <= self.rounding_s + other.rounding_s

    def close(self, timers: Sequence[float]) -> list[float]:
        return [t for t in timers if abs(t - self.seconds) <= self.rounding_s]

    def refined(self, timers: Sequence[float]) -> float:
        """The timer that it is rounded from, where no two ranks differ by more than their noise."""
        close = self.close(timers)
        if not close or max(close) - min(close) > _SAME_TIME_S:
            return self.seconds
        return min(close, key=lambda t: abs(t - self.seconds))


class TimeJudge:
    """Weighs the times of an iteration against each other, knowing the whole log."""

    def __init__(self, windows: Sequence[Window]) -> None:
        rates = [_rate_agrees(w.reading) for w in windows if w.reading is not None]
        known = [agrees for agrees in rates if agrees is not None]
        self._trusts_rate = 2 * sum(known) > len(known)

    def seconds(self, window: Window) -> tuple[float | None, str]:
        """The iteration's time in s, and what is wrong with it.

        A printed time counts when another witness confirms it, or none contradicts it. A timer that
        rounds to it is the printing rank's, and says it in full precision.
        """
        assert window.reading is not None
        printed = _printed(window.reading, window.lost_before + 1)
        if not printed:
            return None, "no time that can be read"
        timers = window.timers
        votes = [self._votes(time, printed, timers, window.reading) for time in printed]
        best = max(confirmed for confirmed, _ in votes)
        chosen = [t for t, (yes, _) in zip(printed, votes, strict=True) if yes == best]
        agree = all(chosen[0].agrees(other) for other in chosen)
        contradicted = any(no for _, no in votes)
        if not agree or (best == 0 and contradicted):
            return None, "two times that do not agree"
        window.time_confirmed = best > 0
        agreeing = [time for time in printed if time.agrees(chosen[0])]
        finest = min(agreeing, key=lambda time: time.rounding_s)
        return finest.refined(timers), ""

    def _votes(
        self, time: _Printed, printed: Sequence[_Printed], timers: Sequence[float], reading: Reading
    ) -> tuple[int, int]:
        """Witnesses that confirm a printed time, and that contradict it."""
        says = [time.agrees(other) for other in printed if other is not time]
        if timers:
            says.append(bool(time.close(timers)))
        if self._trusts_rate:
            rate = _by_rate(reading)
            if rate is not None:
                says.append(rate.agrees(time))
        return sum(says), len(says) - sum(says)


def _printed(reading: Reading, interval: int) -> list[_Printed]:
    found = []
    for name, unit in _UNITS:
        text = reading.values.get(name)
        if text is None or not float(text) > 0:
            continue
        decimals = len(text.partition(".")[2])
        found.append(_Printed(float(text) * unit, 0.51 * unit * 10.0**-decimals + 1e-12))
    if interval > 1 and len(found) > 1 and not found[0].agrees(found[-1]):
        whole = _Printed(found[0].seconds / interval, found[0].rounding_s)
        if whole.agrees(found[-1]):
            return found[-1:]  # the line is of several iterations, and prints their mean too
    return found


def _by_rate(reading: Reading) -> _Printed | None:
    """The time that the samples per second say."""
    text, batch = reading.values.get("samples_per_s"), reading.integer("global_batch_size")
    if text is None or not batch or not float(text) > 0:
        return None
    rate, half = float(text), 0.51 * 10.0 ** -len(text.partition(".")[2])
    return _Printed(batch / rate, batch / max(rate - half, 1e-9) - batch / rate)


def _rate_agrees(reading: Reading) -> bool | None:
    rate, printed = _by_rate(reading), _printed(reading, 1)
    return any(time.agrees(rate) for time in printed) if rate and printed else None
