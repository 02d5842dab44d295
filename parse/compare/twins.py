"""Engines that must have another engine's results, bit for bit, whatever the gate asks for."""

from __future__ import annotations

from collections.abc import Sequence

from parse.compare.gate import NOTHING_TO_COMPARE
from parse.compare.pairs import PointRuns
from parse.compare.verdict import judge_pair
from parse.run_folder import Run
from parse.unmeasured import MEASURED


def twin_verdicts(point: PointRuns, points: Sequence[PointRuns]) -> list[tuple[str, bool]]:
    """What each run of a point comes to beside its twin, in words, and whether it is as it must be.

    A run's twin is the run of the engine that its own engine names in ``equals``, of the same seed
    and settings. Empty for an engine that names none.
    """
    first = point.runs[0]
    row = first.study.engines.get(point.engine or "")
    if row is None or not row.equals or first.source != MEASURED:
        return []
    others = [g for g in points if g.engine == row.equals and g.key == point.key]
    return [_verdict(run, row.equals, others) for run in point.runs]


def _verdict(run: Run, name: str, others: Sequence[PointRuns]) -> tuple[str, bool]:
    seed, length = run.settings.get("seed"), len(run.log.iterations)
    known = [
        other
        for point in others
        for other in point.finished
        if other.settings.get("seed") == seed and len(other.log.iterations) == length
    ]
    if not run.finished or not length:
        return f"not compared with {name}: run {run.status or NOTHING_TO_COMPARE}", False
    if not known:
        return f"not compared with {name}: no finished run of it with seed {seed}", False
    same = [other for other in known if other.repeat == run.repeat] or known
    pair = judge_pair(same[0].log, run.log)
    # Printed digits cannot show that every bit is equal.
    holds = pair.word == "equal" and pair.exact
    words = {"equal": "equal to", "close": "only close to"}.get(pair.word, "differs from")
    detail = pair.text.removeprefix(pair.word) if pair.word else f" ({NOTHING_TO_COMPARE})"
    return f"{words} {name}{detail}", holds
