"""A comparison of two logs as plain data, and what a reader of it should know besides."""

from __future__ import annotations

import math
from typing import Any

from parse.compare.two_runs import Comparison, PhaseRatio
from parse.compare.verdict import LossVerdict
from parse.log.records import Log

VANILLA, OURS = "vanilla", "deep_optimizer_states"
"""Keys of the two sides in the JSON."""

_SHOWN_REJECTS = 5


def comparison_json(vanilla: Log, ours: Log, result: Comparison) -> dict[str, Any]:
    """Everything a comparison says; a time, loss or ratio that is missing is None.

    Times are in s under ``iterations``, in ms elsewhere; a loss that is not finite is None.
    """
    pair = result.pair
    return {
        "iterations": {
            VANILLA: [record.iteration_s for record in vanilla.iterations],
            OURS: [record.iteration_s for record in ours.iterations],
        },
        "losses": {VANILLA: _losses(vanilla), OURS: _losses(ours)},
        "verdict": {VANILLA: result.vanilla.word, OURS: result.ours.word, "pair": pair.word},
        "verdict_detail": {
            VANILLA: _loss_detail(result.vanilla),
            OURS: _loss_detail(result.ours),
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
        "ratio": {name: phase.ratio for name, phase in result.phases.items()},
        "ratio_of_medians": {name: phase.median_ratio for name, phase in result.phases.items()},
        "mean_ms": _both(result.phases, "mean_ms"),
        "median_ms": _both(result.phases, "median_ms"),
        "speedup": result.speedup,
        "speedup_withheld": result.withheld,
        "warmup": result.warmup,
        "tolerance": result.tolerance,
        "notes": comparison_notes(vanilla, ours, result),
    }


def comparison_notes(vanilla: Log, ours: Log, result: Comparison) -> list[str]:
    """What qualifies the figures: common iterations, lines left out, a log that was cut."""
    notes = list(result.pair.notes)
    if any((log.device or "").startswith("cpu") for log in (vanilla, ours)):
        notes.append("the model ran on a CPU: times there say nothing about a GPU")
    for name, log in (("vanilla", vanilla), ("ours", ours)):
        notes += [f"{name}: {note}" for note in log_notes(log)]
    return notes


def log_notes(log: Log) -> list[str]:
    """Notes of one log, its first rejects included."""
    notes = list(log.notes)
    if log.ends_mid_line:
        notes.append(
            f"the log ends in the middle of a line; its {len(log.iterations)} complete iterations "
            "are used"
        )
    notes += [f"line {r.line_number} left out: {r.reason}" for r in log.rejects[:_SHOWN_REJECTS]]
    more = len(log.rejects) - _SHOWN_REJECTS
    return [*notes, f"and {more} more lines left out"] if more > 0 else notes


def _losses(log: Log) -> list[float | None]:
    return [_finite(record.best_loss) for record in log.iterations]


def _loss_detail(verdict: LossVerdict) -> dict[str, Any]:
    return {
        "text": verdict.text,
        "from_iteration": verdict.from_iteration,
        "frozen_at": verdict.at,
        "frozen_at_name": verdict.at_name,
    }


def _both(phases: dict[str, PhaseRatio], name: str) -> dict[str, dict[str, float | None]]:
    return {
        VANILLA: {phase: getattr(pair.vanilla, name) for phase, pair in phases.items()},
        OURS: {phase: getattr(pair.ours, name) for phase, pair in phases.items()},
    }


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
