"""Points against their reference over all repeats: ``tables/comparisons.csv``.

Validity first, then speed: a speed-up stands where the study's gate lets every repeat pass, on the
same code and machine, and not on a CPU. Otherwise the ratio is there and the speed-up is withheld,
with all the reasons.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from configs.study import Study
from parse.compare.gate import Judgement, judge_seeds
from parse.compare.pairs import Pair, PointRuns, gate_words, group_points, pair_up, reference_of
from parse.compare.provenance import differences
from parse.compare.stats import Ratio, ratio_of_medians, spread
from parse.compare.twins import twin_verdicts
from parse.compare.two_runs import ON_CPU
from parse.compare.verdict import DEFAULT_TOLERANCE
from parse.errors import LogError
from parse.run_folder import Run
from parse.table import engine_fields, field_columns, run_row
from parse.unmeasured import NO_SPEEDUP, PUBLISHED, SIMULATED
from parse.write import check_ours, write_table

NOT_COMPARED = "not compared"
_WORST_FIRST = ("differs", NOT_COMPARED, "undecided", "close", "equal")


def timed_phases(study: Study) -> tuple[str, ...]:
    """``iteration`` and the study's phases."""
    return ("iteration", *study.phases)


def comparison_columns(study: Study) -> dict[str, str]:
    """Columns of ``comparisons.csv`` and their types.

    ``*_ms`` are medians after the warm-up where no name says otherwise; ``ratio`` is the
    reference's over ours, so above 1 where ours is faster; ``repeats`` and ``iterations`` count
    ours; ``speedup`` is the ratio where it may be claimed; ``gate`` is the kind of the study's
    gate, and ``verdict`` what it found.
    """
    sides = ("reference", "ours")
    return {
        **{"case": "string", "engine": "string", **field_columns(study, _shown_fields(study))},
        **{"label": "string", "reference_label": "string"},
        **{"repeats": "Int64", "iterations": "Int64", "phase": "string"},
        **{f"{side}_{name}": "Float64" for name in ("ms", "iqr_ms") for side in sides},
        **dict.fromkeys(("ratio", "ratio_low", "ratio_high"), "Float64"),
        **{"paired": "string", "equality": "string", "speedup": "Float64", "withheld": "string"},
        **{"warmup_iterations": "Int64", "interval_covers": "string"},
        **{f"{side}_mean_ms": "Float64" for side in sides},
        **{"reference_repeats": "Int64", "reference_iterations": "Int64", "source": "string"},
        **{"reference": "string", "gate": "string", "verdict": "string"},
    }


def _shown_fields(study: Study) -> list[str]:
    """Fields in which a point and its reference may differ."""
    own = engine_fields(study)
    free = [name for name, row in study.fields.items() if row.in_pairs != "same"]
    return [*own, *(name for name in free if name not in own)]


@dataclass(frozen=True)
class Finding:
    """A sentence of the report: whether a run, or a point over all its runs, is valid."""

    label: str
    verdict: str
    holds: bool


@dataclass(frozen=True)
class PointComparison:
    """A point and the reference engine's point that it is held against."""

    ours: PointRuns
    reference: PointRuns | None
    pairs: tuple[Pair, ...]
    """Each run of ``ours`` with a run of ``reference``."""
    warmup: int
    twins: tuple[tuple[str, bool], ...] = ()
    """Of each run of ``ours``, see :func:`parse.compare.twins.twin_verdicts`."""

    @property
    def study(self) -> Study:
        """What says how to judge."""
        return self.ours.runs[0].study

    @property
    def equality(self) -> str:
        """The worst word of all repeats: ``equal``, ``close``, ``differs``, ``not compared``."""
        if self._over_seeds:
            return self._over_seeds.word or NOT_COMPARED
        words = {pair.word or NOT_COMPARED for pair in self.pairs}
        return next(word for word in _WORST_FIRST if word in words)

    @cached_property
    def withheld(self) -> str:
        """Why there is no speed-up, all reasons in a line; empty where there is one."""
        if self.ours.runs[0].source == SIMULATED and self.reference is not None:
            return NO_SPEEDUP
        reasons = _reasons_of_pairs(self.pairs)
        if self._over_seeds and self._over_seeds.withheld:
            reasons.append(self._over_seeds.withheld)
        reasons += [text for text, holds in self.twins if not holds]
        reasons += self._reasons_of_setup()
        if not reasons and self.ratio("iteration") is None:
            reasons.append("no iteration times on both sides")
        return "; ".join(dict.fromkeys(reasons))

    @property
    def findings(self) -> list[Finding]:
        """What the gate finds, then a sentence for each run that must equal another engine's."""
        twins = zip(self.ours.runs, self.twins, strict=False)
        return [*self._of_gate, *(Finding(run.label, *found) for run, found in twins)]

    @property
    def _of_gate(self) -> list[Finding]:
        """A sentence for each run, or one for all where the gate judges them together."""
        judged = self._over_seeds
        if judged is None:
            return [Finding(pair.run.label, pair.verdict, pair.holds) for pair in self.pairs]
        if not judged.word:
            return [Finding(self.ours.label, f"{NOT_COMPARED}: {judged.withheld}", holds=False)]
        problems = [pair.problem for pair in self.pairs if pair.problem]
        problems += [f"loss: {run.loss.text}" for run in self.ours.runs if run.loss.failed]
        text = "; ".join([*dict.fromkeys(problems), judged.text, gate_words(self.study, judged)])
        return [Finding(self.ours.label, text, judged.passes and not problems)]

    @property
    def verdict(self) -> str:
        """The verdict of the point over its repeats."""
        findings = self._of_gate
        first = findings[0].verdict
        if len(findings) == 1:
            return first
        holding = sum(finding.holds for finding in findings)
        if holding == len(findings):
            return f"{first}, in each of {holding} repeats"
        worst = next(finding for finding in findings if not finding.holds)
        word = "equal" if self.study.gate.kind == "bitwise" else "within the gate"
        return f"{worst.verdict}; {holding} of {len(findings)} repeats are {word}"

    def ratio(self, phase: str) -> Ratio | None:
        """The reference's median over ours, with its interval; None where a side has no times."""
        if phase not in self._ratios:
            self._ratios[phase] = self._make_ratio(phase)
        return self._ratios[phase]

    def speedup(self, phase: str) -> float | None:
        """The ratio where it may be claimed."""
        ratio = self.ratio(phase)
        return ratio.ratio if ratio and not self.withheld else None

    @cached_property
    def _ratios(self) -> dict[str, Ratio | None]:
        return {}

    @cached_property
    def _over_seeds(self) -> Judgement | None:
        """What a gate says that judges all seeds together; None of any other gate."""
        gate, first = self.study.gate, self.pairs[0]
        if gate.kind != "quality":
            return None
        if self.reference is None or self.ours.runs[0].source == SIMULATED:
            return Judgement("", "", first.problem)
        sides = [self._metric(self.reference), self._metric(self.ours)]
        return judge_seeds(gate, self.study.reference, *sides)

    def _metric(self, point: PointRuns) -> dict[object, list[float | None]]:
        found: dict[object, list[float | None]] = {}
        for run in point.finished:
            value = run_row(run, self.warmup).get(self.study.gate.metric)
            number = float(value) if isinstance(value, int | float | str) else None
            found.setdefault(run.settings.get("seed"), []).append(number)
        return found

    def _make_ratio(self, phase: str) -> Ratio | None:
        if self.reference is None:
            return None
        points = self.reference, self.ours
        sides = [point.times_ms(phase, self.warmup) for point in points]
        known, others = (point.repeats for point in points)
        # A sweep runs repeat 1 of all engines, then repeat 2, so what slowed down both cancels.
        alternate = None not in known and len(set(known)) == len(known) and known == others
        return ratio_of_medians(*sides, paired=alternate and all(map(all, sides)))

    def _reasons_of_setup(self) -> list[str]:
        if self.reference is None:
            return []
        ours, other = self.ours.runs[0].settings, self.reference.runs[0].settings
        reasons = [
            f"{self.study.reference} has another {name} ({other.get(name)} for {ours.get(name)})"
            for name, row in self.study.all_fields.items()
            if row.in_pairs == "prefer" and other.get(name) != ours.get(name)
        ]
        runs = [*self.ours.finished, *self.reference.finished]
        reasons += differences(runs)
        return [*reasons, ON_CPU] if any(run.on_cpu for run in runs) else reasons


def compare_points(
    runs: Sequence[Run], warmup: int, tolerance: float = DEFAULT_TOLERANCE
) -> list[PointComparison]:
    """Every point against the reference engine's, in the order of the runs."""
    groups = group_points(runs)
    found = []
    for group in groups:
        first = group.runs[0]
        if group.engine in (first.study.reference, None) or first.source == PUBLISHED:
            continue
        reference = reference_of(group, groups)
        pairs = tuple(pair_up(group, reference, warmup, tolerance))
        twins = tuple(twin_verdicts(group, groups))
        found.append(PointComparison(group, reference, pairs, warmup, twins))
    return found


def write_comparisons(comparisons: Sequence[PointComparison], study: Study, out: Path) -> Path:
    """Write ``comparisons.csv`` and the Parquet file beside it; older ones of ours are replaced.

    Returns:
        The CSV.

    Raises:
        LogError: a file of that name is not one of ours, or the folder cannot be written.
    """
    path = out / "comparisons.csv"
    rows = [_row(item, phase) for item in comparisons for phase in timed_phases(study)]
    try:
        out.mkdir(parents=True, exist_ok=True)
        check_ours(path, "case")
        write_table(path, rows, comparison_columns(study))
    except OSError as error:
        raise LogError(f"{error.filename or out}: cannot be written: {error.strerror}") from None
    return path


def _row(item: PointComparison, phase: str) -> dict[str, Any]:
    points = {"reference": item.reference, "ours": item.ours}
    sides = {
        name: spread(point.times_ms(phase, item.warmup)) if point else None
        for name, point in points.items()
    }
    ours, reference, ratio = sides["ours"], sides["reference"], item.ratio(phase)
    run, study = item.ours.runs[0], item.study
    row: dict[str, Any] = {
        **{name: run.settings.get(name) for name in _shown_fields(study)},
        "case": run.case or None,
        "engine": item.ours.engine,
        "label": item.ours.label,
        "reference_label": item.reference.label if item.reference else None,
        "repeats": ours.repeats if ours else 0,
        "iterations": ours.iterations if ours else 0,
        "phase": phase,
        "equality": item.equality,
        "speedup": item.speedup(phase),
        "withheld": item.withheld or None,
        "warmup_iterations": run.warmup(item.warmup),
        "reference_repeats": reference.repeats if reference else 0,
        "reference_iterations": reference.iterations if reference else 0,
        "source": run.source,
        "reference": study.reference,
        "gate": study.gate.kind,
        "verdict": item.verdict,
    }
    for name, side in sides.items():
        if side:
            row |= {f"{name}_ms": side.median_ms, f"{name}_iqr_ms": side.iqr_ms}
            row[f"{name}_mean_ms"] = side.mean_ms
    if ratio:
        row |= {"ratio": ratio.ratio, "ratio_low": ratio.low, "ratio_high": ratio.high}
        row |= {"paired": "yes" if ratio.paired else "no", "interval_covers": ratio.covers or None}
    return row


def _reasons_of_pairs(pairs: Sequence[Pair]) -> list[str]:
    """Reasons of each repeat; those that not all share say which repeat they are of."""
    found: dict[str, list[int]] = {}
    for number, pair in enumerate(pairs, start=1):
        for reason in [pair.problem] if pair.problem else pair.reasons:
            found.setdefault(reason, []).append(number)
    if len(pairs) == 1:
        return list(found)
    return [
        text if len(numbers) == len(pairs) else f"repeat {', '.join(map(str, numbers))}: {text}"
        for text, numbers in found.items()
    ]
