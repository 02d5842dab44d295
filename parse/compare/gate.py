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

    A seed decides weights and samples, so that the two runs of one have much in common: where both
    sides have the seeds that the gate asks for, the interval is that of the differences seed by
    seed. Otherwise it is Welch's, of two independent means.

    Args:
        gate: Of kind ``quality``.
        name: The reference engine's.
        reference: The metric of its finished runs by their seed; None where a run has none.
        ours: The same of the point to judge.
    """
    assert gate.margin is not None
    sides: list[dict[object, float]] = []
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
        sides.append({s: fmean(v for v in values if v is not None) for s, values in side.items()})
    theirs, mine = sides
    common = [seed for seed in mine if seed in theirs]
    paired = len(common) >= gate.seeds
    if paired:
        theirs, mine = ({seed: side[seed] for seed in common} for side in sides)
        reach = _reach([[mine[seed] - theirs[seed] for seed in common]], gate.confidence)
    else:
        reach = _reach([[*mine.values()], [*theirs.values()]], gate.confidence)
    off = fmean(mine.values()) - fmean(theirs.values())
    low, high = off - reach, off + reach
    figures = (
        f"mean {gate.metric} {fmean(mine.values()):.6g} over {len(mine)} seeds against "
        f"{fmean(theirs.values()):.6g} over {'the same' if paired else len(theirs)}, "
        f"difference {off:+.3g}, {gate.confidence:.0%} interval {low:+.3g} to {high:+.3g}, "
        f"margin {gate.margin:g}"
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


def _reach(samples: Sequence[Sequence[float]], confidence: float) -> float:
    """Half the width of the interval of a mean, or by Welch of the difference of two."""
    if any(len(sample) < 2 for sample in samples):
        return math.inf  # one value says nothing of how far the next one is
    parts = [variance(sample) / len(sample) for sample in samples]
    if not sum(parts):
        return 0.0
    freedom = [p**2 / (len(s) - 1) for p, s in zip(parts, samples, strict=True)]
    degrees = sum(parts) ** 2 / sum(freedom)
    # Imported here: SciPy takes longer to load than most tables take to write.
    from scipy.special import stdtrit

    return float(stdtrit(degrees, (1 + confidence) / 2)) * math.sqrt(sum(parts))
