"""Two logs side by side: times, verdicts, and a speed-up if the verdicts allow it.

Standard library alone: ``quick-parse-results.py`` is made of this.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, NamedTuple

from configs.files import printable
from parse.records import PHASES, Log, after_warmup, finite
from parse.verdict import DEFAULT_TOLERANCE, LossVerdict, PairVerdict, judge_log, judge_pair

MINIMUM_TIMED = 2
"""Iterations after the warm-up below which no speed-up is worth stating."""
ON_CPU = "measured on a CPU"
"""Why a CPU's figures never make a speed-up."""
COMPARED_PHASES = ("iteration", *PHASES, "backward_inner", "backward_allreduce", "optimizer_step")
_SHOWN_REJECTS = 5


class Timing(NamedTuple):
    """Statistics of one phase after the warm-up; None without figures."""

    mean_ms: float | None
    median_ms: float | None
    n: int


class PhaseRatio(NamedTuple):
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
        name: PhaseRatio(_timing(reference, name, warmup), _timing(ours, name, warmup))
        for name in COMPARED_PHASES
    }
    verdicts = judge_log(reference), judge_log(ours)
    pair = judge_pair(reference, ours, tolerance)
    reasons = loss_reasons(names, verdicts)
    if pair.word not in ("equal", "close"):
        reasons.append(f"the pair {pair.text}" if pair.word else "no iteration to compare")
    times = phases["iteration"]
    reasons += timing_reasons((times.reference.n, times.ours.n), warmup)
    if reference.on_cpu or ours.on_cpu:
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
    """Return why the losses of two runs allow no speed-up, if they do not."""
    return [
        f"the loss of {name} is {verdict.text}" if verdict.word else f"{name} has no loss"
        for name, verdict in zip(names, verdicts, strict=True)
        if verdict.failed or not verdict.word
    ]


def timing_reasons(timed: tuple[int, int], warmup: int) -> list[str]:
    """Return why so many timed iterations of two runs allow no speed-up, if they do not."""
    if min(timed) >= MINIMUM_TIMED:
        return []
    return [
        f"{min(timed)} timed iterations after a warm-up of {warmup}, "
        f"at least {MINIMUM_TIMED} are needed"
    ]


def comparison_json(
    logs: tuple[Log, Log], result: Comparison, keys: tuple[str, str], names: tuple[str, str]
) -> dict[str, Any]:
    """Return everything a comparison says; a time, loss or ratio that is missing is None.

    Times are in s under ``iterations``, in ms elsewhere; a loss that is not finite is None.

    Args:
        logs: The reference and the run that is held against it.
        result: What was found.
        keys: Of the two sides in the object.
        names: What notes call them.
    """
    pair, verdicts, phases = result.pair, (result.reference, result.ours), result.phases

    def both(values: Iterable[Any]) -> dict[str, Any]:
        return dict(zip(keys, values, strict=True))

    def of_phases(name: str) -> dict[str, Any]:
        return both(
            {phase: getattr(getattr(found, side), name) for phase, found in phases.items()}
            for side in ("reference", "ours")
        )

    return {
        "iterations": both([record.iteration_s for record in log.iterations] for log in logs),
        "losses": both([_finite(record.best_loss) for record in log.iterations] for log in logs),
        "verdict": {**both(verdict.word for verdict in verdicts), "pair": pair.word},
        "verdict_detail": {
            **both(
                {
                    "text": verdict.text,
                    "from_iteration": verdict.from_iteration,
                    "frozen_at": verdict.at,
                    "frozen_at_name": verdict.at_name,
                }
                for verdict in verdicts
            ),
            "pair": {
                "text": pair.text,
                "judged_on": pair.judged_on,
                "exact": pair.exact,
                "compared_iterations": pair.num_losses,
                "first_difference": pair.first_difference,
                "from_iteration": pair.from_iteration,
                "largest_difference": _finite(pair.largest_difference),
                "largest_difference_iteration": pair.largest_at,
                "state_differs": list(pair.state_differs),
            },
        },
        "ratio": {name: phase.ratio for name, phase in phases.items()},
        "ratio_of_medians": {name: phase.median_ratio for name, phase in phases.items()},
        "mean_ms": of_phases("mean_ms"),
        "median_ms": of_phases("median_ms"),
        "speedup": result.speedup,
        "speedup_withheld": result.withheld,
        "warmup": result.warmup,
        "tolerance": result.tolerance,
        "notes": comparison_notes(logs, result, names),
    }


def comparison_notes(
    logs: tuple[Log, Log], result: Comparison, names: tuple[str, str]
) -> list[str]:
    """Return what qualifies the figures: common iterations, lines left out, a log that was cut."""
    notes = list(result.pair.notes)
    if any(log.on_cpu for log in logs):
        notes.append("the model ran on a CPU: times there say nothing about a GPU")
    for name, log in zip(names, logs, strict=True):
        notes += [f"{name}: {note}" for note in log_notes(log)]
    return notes


def reject_lines(log: Log) -> list[str]:
    """Return all lines of a log that were left out: ``FILE:LINE: reason: text``."""
    path = printable(str(log.path))
    return [f"{path}:{r.line_number}: {r.reason}: {r.text}".removesuffix(": ") for r in log.rejects]


def log_notes(log: Log) -> list[str]:
    """Return the notes of one log, its first rejects included."""
    notes = list(log.notes)
    if log.ends_mid_line:
        notes.append(
            f"the log ends in the middle of a line; its {len(log.iterations)} complete iterations "
            "are used"
        )
    notes += [f"line {r.line_number} left out: {r.reason}" for r in log.rejects[:_SHOWN_REJECTS]]
    more = len(log.rejects) - _SHOWN_REJECTS
    return [*notes, f"and {more} more lines left out"] if more > 0 else notes


def _timing(log: Log, phase: str, warmup: int) -> Timing:
    times = finite([r.phase_ms(phase) for r in after_warmup(log.iterations, warmup)])
    return Timing(fmean(times), median(times), len(times)) if times else Timing(None, None, 0)


def _ratio(reference: float | None, ours: float | None) -> float | None:
    return reference / ours if reference is not None and ours else None


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
