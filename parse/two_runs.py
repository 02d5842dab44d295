"""Two logs side by side: times, verdicts, and a speed-up if the verdicts allow it.

Standard library alone: ``quick-parse-results.py`` is made of this.
"""

from __future__ import annotations

import math
from statistics import fmean, median
from typing import Any

from configs.files import printable
from parse.records import PHASES, Log, after_warmup, finite
from parse.verdict import DEFAULT_TOLERANCE, LossVerdict, judge_log, judge_pair

MINIMUM_TIMED = 2
"""Iterations after the warm-up below which no speed-up is worth stating."""
ON_CPU = "measured on a CPU"
"""Why a CPU's figures never make a speed-up."""
TIMED = ("iteration", *PHASES, "backward_inner", "backward_allreduce", "optimizer_step")
_SHOWN_REJECTS = 5


def compare(
    reference: Log,
    ours: Log,
    warmup: int = 1,
    tolerance: float = DEFAULT_TOLERANCE,
    keys: tuple[str, str] = ("reference", "ours"),
) -> dict[str, Any]:
    """Compare two logs on their own, without what a run folder says of them.

    Args:
        reference: What it is held against.
        ours: The run whose speed-up is asked for.
        warmup: First iterations to leave out of times (not of losses).
        tolerance: Largest absolute difference of two losses that allows a speed-up.
        keys: Of the two sides in the object; reasons call them so.

    Returns:
        An object for JSON, with both sides by their keys. A time, loss or ratio that is missing,
        and a loss that is not finite, is None. Times are in s under ``iterations``, in ms
        elsewhere; ``speedup`` is the ratio of the median iterations, None when it is withheld.
    """
    logs = dict(zip(keys, (reference, ours), strict=True))
    losses = {key: judge_log(log) for key, log in logs.items()}
    pair = judge_pair(reference, ours, tolerance)
    times = {key: {phase: _times(log, phase, warmup) for phase in TIMED}
             for key, log in logs.items()}  # fmt: skip
    means, medians = (
        {key: {phase: of(ms) if ms else None for phase, ms in own.items()}
         for key, own in times.items()}
        for of in (fmean, median)
    )  # fmt: skip
    counts = {key: {phase: len(ms) for phase, ms in own.items()} for key, own in times.items()}
    reasons = loss_reasons(tuple(key.replace("_", "-") for key in keys), tuple(losses.values()))
    if pair.word not in ("equal", "close"):
        reasons.append(f"the pair {pair.text}" if pair.word else "no iteration to compare")
    reasons += timing_reasons([own["iteration"] for own in counts.values()], warmup)
    reasons += [ON_CPU] if reference.on_cpu or ours.on_cpu else []
    ratios = _ratios(medians)
    return {
        "iterations": {k: [r.iteration_s for r in log.iterations] for k, log in logs.items()},
        "losses": {k: [_finite(r.best_loss) for r in log.iterations] for k, log in logs.items()},
        "verdict": {key: loss.word for key, loss in losses.items()} | {"pair": pair.word},
        "verdict_detail": {key: _loss_detail(loss) for key, loss in losses.items()}
        | {
            "pair": {
                "text": pair.text,
                "judged_on": pair.judged_on,
                "exact": pair.exact,
                "compared_iterations": pair.num_losses,
                "from_iteration": pair.from_iteration,
                "largest_difference": _finite(pair.largest_difference),
                "largest_difference_iteration": pair.largest_at,
                "state_differs": list(pair.state_differs),
            },
        },
        "ratio": _ratios(means),
        "ratio_of_medians": ratios,
        "mean_ms": means,
        "median_ms": medians,
        "timed_iterations": counts,
        "speedup": None if reasons else ratios["iteration"],
        "speedup_withheld": "; ".join(reasons) or None,
        "warmup": warmup,
        "tolerance": tolerance,
        "notes": _notes(logs, pair.num_losses),
    }


def loss_reasons(names: tuple[str, ...], verdicts: tuple[LossVerdict, ...]) -> list[str]:
    """Return why the losses of runs allow no speed-up, if they do not."""
    return [
        f"the loss of {name} is {verdict.text}" if verdict.word else f"{name} has no loss"
        for name, verdict in zip(names, verdicts, strict=True)
        if verdict.failed or not verdict.word
    ]


def timing_reasons(timed: list[int], warmup: int) -> list[str]:
    """Return why so many timed iterations of runs allow no speed-up, if they do not."""
    if min(timed) >= MINIMUM_TIMED:
        return []
    return [
        f"{min(timed)} timed iterations after a warm-up of {warmup}, "
        f"at least {MINIMUM_TIMED} are needed"
    ]


def reject_lines(log: Log) -> list[str]:
    """Return all lines of a log that were left out: ``FILE:LINE: reason: text``."""
    path = printable(str(log.path))
    return [f"{path}:{r.line}: {r.reason}: {r.text}".removesuffix(": ") for r in log.rejects]


def log_notes(log: Log) -> list[str]:
    """Return the notes of one log, its first rejects included."""
    notes = list(log.notes)
    if log.ends_mid_line:
        notes.append(
            f"the log ends in the middle of a line; its {len(log.iterations)} complete iterations "
            "are used"
        )
    notes += [f"line {r.line} left out: {r.reason}" for r in log.rejects[:_SHOWN_REJECTS]]
    more = len(log.rejects) - _SHOWN_REJECTS
    return [*notes, f"and {more} more lines left out"] if more > 0 else notes


def _notes(logs: dict[str, Log], compared: int) -> list[str]:
    """Say what qualifies the figures: common iterations, lines left out, a log that was cut."""
    lengths = [len(log.iterations) for log in logs.values()]
    notes = []
    if lengths != [compared, compared]:
        both = f"{lengths[0]} and {lengths[1]} iterations"
        notes.append(f"{both}; the {compared} that both have were compared")
    if any(log.on_cpu for log in logs.values()):
        notes.append("the model ran on a CPU: times there say nothing about a GPU")
    for name, log in zip((next(iter(logs)), "ours"), logs.values(), strict=True):
        notes += [f"{name}: {note}" for note in log_notes(log)]
    return notes


def _loss_detail(loss: LossVerdict) -> dict[str, Any]:
    return {
        "text": loss.text,
        "from_iteration": loss.from_iteration,
        "frozen_at": loss.at,
        "frozen_at_name": loss.at_name,
    }


def _times(log: Log, phase: str, warmup: int) -> list[float]:
    return finite([record.phase_ms(phase) for record in after_warmup(log.iterations, warmup)])


def _ratios(times_ms: dict[str, dict[str, float | None]]) -> dict[str, float | None]:
    """How many times faster ours is than the reference, by phase."""
    theirs, ours = times_ms.values()
    return {
        phase: above / below if above is not None and (below := ours[phase]) else None
        for phase, above in theirs.items()
    }


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
