"""A comparison of two logs as plain data, and what a reader of it should know besides."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from configs.files import printable
from parse.compare.two_runs import Comparison
from parse.compare.verdict import LossVerdict
from parse.log.records import Log

_SHOWN_REJECTS = 5


def comparison_json(
    logs: tuple[Log, Log], result: Comparison, keys: tuple[str, str], names: tuple[str, str]
) -> dict[str, Any]:
    """Everything a comparison says; a time, loss or ratio that is missing is None.

    Times are in s under ``iterations``, in ms elsewhere; a loss that is not finite is None.

    Args:
        logs: The reference and the run that is held against it.
        result: What was found.
        keys: Of the two sides in the object.
        names: What notes call them.
    """
    pair, verdicts = result.pair, (result.reference, result.ours)

    def both(values: Iterable[Any]) -> dict[str, Any]:
        return dict(zip(keys, values, strict=True))

    def of_phases(name: str) -> dict[str, Any]:
        sides = ("reference", "ours")
        return both(
            {phase: getattr(getattr(found, side), name) for phase, found in result.phases.items()}
            for side in sides
        )

    return {
        "iterations": both([record.iteration_s for record in log.iterations] for log in logs),
        "losses": both([_finite(record.best_loss) for record in log.iterations] for log in logs),
        "verdict": {**both(verdict.word for verdict in verdicts), "pair": pair.word},
        "verdict_detail": {
            **both(_loss_detail(verdict) for verdict in verdicts),
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
    """What qualifies the figures: common iterations, lines left out, a log that was cut."""
    notes = list(result.pair.notes)
    if any((log.device or "").startswith("cpu") for log in logs):
        notes.append("the model ran on a CPU: times there say nothing about a GPU")
    for name, log in zip(names, logs, strict=True):
        notes += [f"{name}: {note}" for note in log_notes(log)]
    return notes


def reject_lines(log: Log) -> list[str]:
    """All lines of a log that were left out: ``FILE:LINE: reason: text``."""
    path = printable(str(log.path))
    return [f"{path}:{r.line_number}: {r.reason}: {r.text}".removesuffix(": ") for r in log.rejects]


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


def _loss_detail(verdict: LossVerdict) -> dict[str, Any]:
    return {
        "text": verdict.text,
        "from_iteration": verdict.from_iteration,
        "frozen_at": verdict.at,
        "frozen_at_name": verdict.at_name,
    }


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
