"""Two runs side by side: times of each phase, verdicts, and a speed-up if the verdicts allow it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import fmean, median

from parse.compare.verdict import DEFAULT_TOLERANCE, LossVerdict, PairVerdict, judge_log, judge_pair
from parse.log.records import PHASES, Log, values_ms

MINIMUM_TIMED = 2
"""Iterations after the warm-up below which no speed-up is worth stating."""
ON_CPU = "measured on a CPU"
"""Why a CPU's figures never make a speed-up."""
COMPARED_PHASES = ("iteration", *PHASES, "backward_inner", "backward_allreduce", "optimizer_step")


@dataclass(frozen=True)
class Timing:
    """Statistics of one phase after the warm-up."""

    mean_ms: float | None
    median_ms: float | None
    n: int

    @classmethod
    def of(cls, log: Log, phase: str, warmup: int) -> Timing:
        """Statistics of a log's phase; without figures all is None and ``n`` 0."""
        values = values_ms(log, phase, warmup)
        if not values:
            return cls(None, None, 0)
        return cls(fmean(values), median(values), len(values))


@dataclass(frozen=True)
class PhaseRatio:
    """One phase of both runs."""

    vanilla: Timing
    ours: Timing

    @property
    def ratio(self) -> float | None:
        """How many times faster than vanilla, by the means; None when a side is missing."""
        return _ratio(self.vanilla.mean_ms, self.ours.mean_ms)

    @property
    def median_ratio(self) -> float | None:
        """The same by the medians."""
        return _ratio(self.vanilla.median_ms, self.ours.median_ms)


@dataclass(frozen=True)
class Comparison:
    """What can be said of a pair of runs."""

    vanilla: LossVerdict
    ours: LossVerdict
    pair: PairVerdict
    phases: dict[str, PhaseRatio]
    speedup: float | None
    """Ratio of the mean iteration times; None when it is withheld."""
    withheld: str | None
    """Why it is withheld."""
    warmup: int
    tolerance: float


def compare(
    vanilla: Log, ours: Log, warmup: int = 1, tolerance: float = DEFAULT_TOLERANCE
) -> Comparison:
    """Compare a run with the vanilla run of the same point.

    Args:
        vanilla: The reference.
        ours: The run whose speed-up is asked for.
        warmup: First iterations to leave out of times (not of losses).
        tolerance: Largest absolute difference of two losses that allows a speed-up.
    """
    phases = {
        name: PhaseRatio(Timing.of(vanilla, name, warmup), Timing.of(ours, name, warmup))
        for name in COMPARED_PHASES
    }
    verdicts = judge_log(vanilla), judge_log(ours)
    pair = judge_pair(vanilla, ours, tolerance)
    reasons = _reasons(verdicts, pair, phases["iteration"], warmup)
    return Comparison(
        *verdicts,
        pair,
        phases,
        speedup=None if reasons else phases["iteration"].ratio,
        withheld="; ".join(reasons) or None,
        warmup=warmup,
        tolerance=tolerance,
    )


def compare_alone(
    vanilla: Log, ours: Log, warmup: int = 1, tolerance: float = DEFAULT_TOLERANCE
) -> Comparison:
    """The same of two logs on their own, whose speed-up a CPU withholds as well.

    Tables say that once for all repeats of a pair, in :mod:`parse.compare.comparisons`.
    """
    result = compare(vanilla, ours, warmup, tolerance)
    if not any((log.device or "").startswith("cpu") for log in (vanilla, ours)):
        return result
    reasons = filter(None, (result.withheld, ON_CPU))
    return replace(result, speedup=None, withheld="; ".join(reasons))


def _reasons(
    verdicts: tuple[LossVerdict, LossVerdict], pair: PairVerdict, times: PhaseRatio, warmup: int
) -> list[str]:
    reasons = []
    for name, verdict in zip(("vanilla", "deep-optimizer-states"), verdicts, strict=True):
        if verdict.word != "trains":
            reasons.append(
                f"the loss of {name} is {verdict.text}" if verdict.word else f"{name} has no loss"
            )
    if pair.word not in ("equal", "close"):
        reasons.append(f"the pair {pair.text}" if pair.word else "no iteration to compare")
    timed = min(times.vanilla.n, times.ours.n)
    if timed < MINIMUM_TIMED:
        reasons.append(
            f"{timed} timed iterations after a warm-up of {warmup}, "
            f"at least {MINIMUM_TIMED} are needed"
        )
    return reasons


def _ratio(vanilla: float | None, ours: float | None) -> float | None:
    return vanilla / ours if vanilla is not None and ours else None
