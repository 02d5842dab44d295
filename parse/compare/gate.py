"""The claim gate of a study: what must hold before a ratio of times is called a speed-up.

``bitwise`` and ``close`` are judged run by run, ``quality`` over all seeds of a point.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, variance

from configs.study import Gate
from parse.compare.verdict import (
    DEFAULT_TOLERANCE,
    both_exact,
    common_losses,
    in_common,
    judge_pair,
)
from parse.log.records import Log

NOTHING_TO_COMPARE = "no iteration to compare"
_AGAINST = {"equal": "equal to", "close": "close to", "differs": "differs from"}


@dataclass(frozen=True)
class Judgement:
    """What a gate says of a run, or of all runs of a point, against the reference."""

    word: str
    """``equal``, ``close``, ``differs`` or ``undecided``; empty where nothing was compared."""
    text: str
    """The same with its figures, naming the reference, as a person reads it."""
    withheld: str
    """Why there is no speed-up; empty where the gate lets one pass."""

    @property
    def passes(self) -> bool:
        """Whether the gate lets a speed-up pass."""
        return not self.withheld


def judge_runs(
    gate: Gate, name: str, reference: Log, ours: Log, tolerance: float = DEFAULT_TOLERANCE
) -> Judgement:
    """Judge a run against a run of the reference engine, for a gate that does so.

    Args:
        gate: Of kind ``bitwise`` or ``close``.
        name: The reference engine's.
        reference: Its run.
        ours: The run to judge.
        tolerance: Largest difference of two losses that a bitwise gate calls ``close``.
    """
    if gate.kind == "close":
        return _close(gate, name, reference, ours)
    pair = judge_pair(reference, ours, tolerance)
    if not pair.word:
        return Judgement("", "", NOTHING_TO_COMPARE)
    # Printed digits show equality in every bit no better than close digits disprove it.
    passes = pair.word == "equal" or (pair.word == "close" and not pair.exact)
    text = f"{_AGAINST[pair.word]} {name}{pair.text.removeprefix(pair.word)}"
    reason = f"the pair is only {pair.text}" if pair.word == "close" else f"the pair {pair.text}"
    return Judgement(pair.word, text, "" if passes else reason)


def judge_seeds(
    gate: Gate,
    name: str,
    reference: Mapping[object, Sequence[float | None]],
    ours: Mapping[object, Sequence[float | None]],
) -> Judgement:
    """Judge a point against the reference's over all seeds, for a ``quality`` gate.

    Args:
        gate: Of kind ``quality``.
        name: The reference engine's.
        reference: The metric of its finished runs by their seed; None where a run has none.
        ours: The same of the point to judge.
    """
    assert gate.margin is not None
    sides = []
    for who, side in ((name, reference), ("the run", ours)):
        missing = [s for s, values in side.items() if any(not _is_number(v) for v in values)]
        if missing:
            listed = ", ".join(str(seed) for seed in missing)
            return Judgement(
                "", "", f"{gate.metric} of {who} is missing or no number, seed {listed}"
            )
        if len(side) < gate.seeds:
            return Judgement(
                "", "", f"{len(side)} seeds of {who}, the gate asks for {gate.seeds} at least"
            )
        # Repeats of a seed are no more samples of how training turns out.
        sides.append([fmean(v for v in values if v is not None) for values in side.values()])
    off = fmean(sides[1]) - fmean(sides[0])
    reach = _reach(sides[1], sides[0], gate.confidence)
    low, high = off - reach, off + reach
    figures = (
        f"mean {gate.metric} {fmean(sides[1]):.6g} over {len(sides[1])} seeds against "
        f"{fmean(sides[0]):.6g} over {len(sides[0])}, difference {off:+.3g}, "
        f"{gate.confidence:.0%} interval {low:+.3g} to {high:+.3g}, margin {gate.margin:g}"
    )
    if high < gate.margin:
        return Judgement("close", f"as good as {name} ({figures})", "")
    if low > gate.margin:
        return Judgement("differs", f"worse than {name} ({figures})", f"worse: {figures}")
    text = f"not known to be as good as {name} ({figures})"
    return Judgement("undecided", text, f"the interval reaches the margin: {figures}")


def _close(gate: Gate, name: str, reference: Log, ours: Log) -> Judgement:
    assert gate.tolerance is not None
    common = {r.iteration for r in reference.iterations} & {r.iteration for r in ours.iterations}
    if gate.quantity == "loss":
        pairs = common_losses(reference, ours, both_exact(reference, ours))
    else:
        pairs = in_common(reference, ours, lambda _, record: record.grad_norm)
    if not common:
        return Judgement("", "", NOTHING_TO_COMPARE)
    if len(pairs) < len(common):
        lacking = f"{len(common) - len(pairs)} of {len(common)} iterations lack a {gate.quantity}"
        return Judgement("", "", lacking)
    # A value that is not finite is beyond any tolerance, whatever the other run has there.
    found = [(abs(a - b) if math.isfinite(a - b) else math.inf, i) for i, a, b in pairs]
    largest, at = max(found, key=lambda item: item[0])
    figures = (
        f"largest difference of {gate.quantity} {largest:.3g} at iteration {at} of {len(pairs)}, "
        f"tolerance {gate.tolerance:g}"
    )
    word = "equal" if largest == 0 else "close" if largest <= gate.tolerance else "differs"
    withheld = f"the pair differs: {figures}" if word == "differs" else ""
    return Judgement(word, f"{_AGAINST[word]} {name} ({figures})", withheld)


def _is_number(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _reach(ours: Sequence[float], reference: Sequence[float], confidence: float) -> float:
    """Half the width of Welch's interval of a difference of means."""
    if min(len(ours), len(reference)) < 2:
        return math.inf  # one value says nothing of how far the next one is
    parts = [variance(side) / len(side) for side in (ours, reference)]
    if not sum(parts):
        return 0.0
    sizes = len(ours) - 1, len(reference) - 1
    degrees = sum(parts) ** 2 / sum(p**2 / n for p, n in zip(parts, sizes, strict=True))
    # Imported here: SciPy takes longer to load than most tables take to write.
    from scipy.special import stdtrit

    return float(stdtrit(degrees, (1 + confidence) / 2)) * math.sqrt(sum(parts))
