"""Two runs side by side: times of each phase, verdicts, and a speed-up if the verdicts allow it."""

from __future__ import annotations

from dataclasses import dataclass
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

    reference: Timing
    ours: Timing

    @property
    def ratio(self) -> float | None:
        """How many times faster than the reference, by the means; None when a side is missing."""
        return _ratio(self.reference.mean_ms, self.ours.mean_ms)

    @property
    def median_ratio(self) -> float | None:
        """The same by the medians."""
        return _ratio(self.reference.median_ms, self.ours.median_ms)


@dataclass(frozen=True)
class Comparison:
    """What can be said of a pair of runs."""

    reference: LossVerdict
    ours: LossVerdict
    pair: PairVerdict
    phases: dict[str, PhaseRatio]
    speedup: float | None
    """Ratio of the median iteration times; None when it is withheld."""
    withheld: str | None
    """Why it is withheld."""
    warmup: int
    tolerance: float


def compare(
    reference: Log,
    ours: Log,
    warmup: int = 1,
    tolerance: float = DEFAULT_TOLERANCE,
    names: tuple[str, str] = ("the reference", "the run"),
) -> Comparison:
    """Compare two logs on their own, without what a run folder says of them.

    Args:
        reference: What it is held against.
        ours: The run whose speed-up is asked for.
        warmup: First iterations to leave out of times (not of losses).
        tolerance: Largest absolute difference of two losses that allows a speed-up.
        names: What reasons call the two.
    """
    phases = {
        name: PhaseRatio(Timing.of(reference, name, warmup), Timing.of(ours, name, warmup))
        for name in COMPARED_PHASES
    }
    verdicts = judge_log(reference), judge_log(ours)
    pair = judge_pair(reference, ours, tolerance)
    reasons = loss_reasons(names, verdicts)
    if pair.word not in ("equal", "close"):
        reasons.append(f"the pair {pair.text}" if pair.word else "no iteration to compare")
    times = phases["iteration"]
    reasons += timing_reasons((times.reference.n, times.ours.n), warmup)
    if any((log.device or "").startswith("cpu") for log in (reference, ours)):
        reasons.append(ON_CPU)
    return Comparison(
        *verdicts,
        pair,
        phases,
        speedup=None if reasons else times.median_ratio,
        withheld="; ".join(reasons) or None,
        warmup=warmup,
        tolerance=tolerance,
    )


def loss_reasons(names: tuple[str, str], verdicts: tuple[LossVerdict, LossVerdict]) -> list[str]:
    """Why the losses of two runs allow no speed-up, if they do not."""
    return [
        f"the loss of {name} is {verdict.text}" if verdict.word else f"{name} has no loss"
        for name, verdict in zip(names, verdicts, strict=True)
        if verdict.failed or not verdict.word
    ]


def timing_reasons(timed: tuple[int, int], warmup: int) -> list[str]:
    """Why so many timed iterations of two runs allow no speed-up, if they do not."""
    if min(timed) >= MINIMUM_TIMED:
        return []
    return [
        f"{min(timed)} timed iterations after a warm-up of {warmup}, "
        f"at least {MINIMUM_TIMED} are needed"
    ]


def _ratio(reference: float | None, ours: float | None) -> float | None:
    return reference / ours if reference is not None and ours else None
