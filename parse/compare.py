"""Points against their reference over all repeats: ``tables/comparisons.csv``.

Validity first, then speed: a speed-up stands where the study's gate lets every repeat pass, on the
same code and machine, and not on a CPU. Otherwise the ratio is there and the speed-up is withheld,
with all the reasons. ``bitwise`` and ``close`` gates judge run by run, ``quality`` judges over all
seeds of a point.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import fmean, variance
from typing import Any, NamedTuple

from configs.study import Gate, Study
from parse.records import Log
from parse.run import MEASURED, PUBLISHED, SIMULATED, PointRuns, Run, group_points
from parse.stats import Ratio, ratio_of_medians, spread
from parse.tables import check_ours, engine_fields, field_columns, run_row, write_table, writing
from parse.two_runs import ON_CPU, loss_reasons, timing_reasons
from parse.verdict import DEFAULT_TOLERANCE, both_exact, common_losses, in_common, judge_pair

NOT_COMPARED = "not compared"
NO_SPEEDUP = "simulated: a predicted ratio, not a measured speed-up"
"""Why predictions never make a speed-up."""
_NOTHING_TO_COMPARE = "no iteration to compare"
_WORST_FIRST = ("differs", NOT_COMPARED, "undecided", "close", "equal")
_AGAINST = {"equal": "equal to", "close": "close to", "differs": "differs from"}


# The gate


class Judgement(NamedTuple):
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
    """Judge a run against a run of the reference engine.

    Args:
        gate: Of kind ``bitwise`` or ``close``.
        name: The reference engine's.
        reference: Its run.
        ours: The run to judge.
        tolerance: Largest difference of two losses that a bitwise gate calls ``close``.
    """
    if gate.kind == "close":
        return _judge_closeness(gate, name, reference, ours)
    pair = judge_pair(reference, ours, tolerance)
    if not pair.word:
        return Judgement("", "", _NOTHING_TO_COMPARE)
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
        missing = [
            str(seed)
            for seed, values in side.items()
            if any(value is None or not math.isfinite(value) for value in values)
        ]
        if missing:
            what = f"{gate.metric} of {who} is missing or no number, seed {', '.join(missing)}"
            return Judgement("", "", what)
        if len(side) < gate.seeds:
            what = f"{len(side)} seeds of {who}, the gate asks for {gate.seeds} at least"
            return Judgement("", "", what)
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


def _judge_closeness(gate: Gate, name: str, reference: Log, ours: Log) -> Judgement:
    assert gate.tolerance is not None
    common = {r.iteration for r in reference.iterations} & {r.iteration for r in ours.iterations}
    if gate.quantity == "loss":
        pairs = common_losses(reference, ours, both_exact(reference, ours))
    else:
        pairs = in_common(reference, ours, lambda record: record.grad_norm)
    if not common:
        return Judgement("", "", _NOTHING_TO_COMPARE)
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


def _reach(samples: Sequence[Sequence[float]], confidence: float) -> float:
    """Half the width of the interval of a mean, or by Welch of the difference of two."""
    if any(len(sample) < 2 for sample in samples):
        return math.inf  # one value says nothing of how far the next one is
    parts = [variance(sample) / len(sample) for sample in samples]
    if not sum(parts):
        return 0.0
    freedom = [p**2 / (len(s) - 1) for p, s in zip(parts, samples, strict=True)]
    degrees = sum(parts) ** 2 / sum(freedom)
    from scipy.special import stdtrit  # here: SciPy takes longer to load than most tables

    return float(stdtrit(degrees, (1 + confidence) / 2)) * math.sqrt(sum(parts))


# Pairs of runs


class Pair(NamedTuple):
    """A run and the run of the reference engine that it is held against."""

    run: Run
    reference: Run | None
    """None when there is no run of the reference engine at the same point."""
    judgement: Judgement | None = None
    """What the gate says, if it judges run by run; None when one side has no iterations."""
    reasons: tuple[str, ...] = ()
    """Why the figures of the two allow no speed-up."""

    @property
    def word(self) -> str:
        """``equal``, ``close``, ``differs``; empty unless two finished runs were compared."""
        return "" if self.judgement is None or self.problem else self.judgement.word

    @property
    def holds(self) -> bool:
        """Whether the run finished, trained and is what its study expects of it."""
        if self.judgement is None or self.problem or self.run.loss.failed:
            return False
        row = self.run.study.engines.get(self.run.engine or "")
        as_said = self.word == "equal" or (row is not None and not row.exact)
        return as_said if self.run.study.gate.kind == "bitwise" else self.judgement.passes

    @property
    def verdict(self) -> str:
        """``equal to REFERENCE (...)``, ``differs from ...``, or why there is no verdict."""
        problem, judgement = self.problem, self.judgement
        if judgement is None or not judgement.word:
            reason = problem or (judgement.withheld if judgement else _NOTHING_TO_COMPARE)
            return f"{NOT_COMPARED}: {reason}"
        if problem:
            parts = [f"{problem}; as far as it got {judgement.text}"]
        else:
            parts = [judgement.text, _gate_words(self.run.study, judgement)]
        if self.run.loss.word != "trains":
            parts.append(f"loss: {self.run.loss.text}")
        return "; ".join(parts)

    @property
    def problem(self) -> str:
        """Why no verdict is possible, whatever the figures say; empty where one is."""
        name = self.run.study.reference
        if self.reference is None:
            return f"no {name} run of this point"
        if self.run.source != MEASURED:
            return f"{self.run.source}: there is no loss to compare"
        for who, run in (("run", self.run), (f"{name} run", self.reference)):
            if not run.finished:
                return f"{who} {run.status}" + (f" ({run.cause})" if run.cause else "")
            if not run.log.iterations:
                return f"{who} has no complete iteration in its log"
        return ""


def _gate_words(study: Study, judgement: Judgement) -> str:
    return f"gate {study.gate.kind} {'passed' if judgement.passes else 'not passed'}"


def reference_of(group: PointRuns, groups: Sequence[PointRuns]) -> PointRuns | None:
    """Return the reference engine's point that a point is held against.

    That of the same settings; else one that computes the same with other settings of those that
    should agree; None when there is none. Of several campaigns, only the runs that were measured
    in one of the point's own, if there are any.
    """
    same = [g for g in groups if g.engine == group.study.reference and g.key == group.key]
    exact = [g for g in same if g.preferred == group.preferred] or same
    found = next((g for g in exact if g.finished), exact[0] if exact else None)
    campaigns = {run.campaign for run in group.runs}
    near = [run for run in found.finished if run.campaign in campaigns] if found else []
    return PointRuns(near, found.label) if found and near else found


def pair_up(
    group: PointRuns, reference: PointRuns | None, warmup: int, tolerance: float = DEFAULT_TOLERANCE
) -> list[Pair]:
    """Hold each run of a point against a run of the reference, in the order of the runs.

    The same repeat of the same campaign where it finished; else any that did: all of one seed and
    data compute the same.
    """
    pairs = []
    for position, run in enumerate(group.runs):
        partner = _partner(run, position, reference)
        comparable = partner and partner.log.iterations and run.log.iterations
        if partner and comparable and run.source == MEASURED:
            pairs.append(_judged(run, partner, warmup, tolerance))
        else:
            pairs.append(Pair(run, partner))
    return pairs


def _judged(run: Run, reference: Run, warmup: int, tolerance: float) -> Pair:
    study, judgement = run.study, None
    reasons = loss_reasons((study.reference, str(run.engine)), (reference.loss, run.loss))
    if study.gate.kind != "quality":
        judgement = judge_runs(study.gate, study.reference, reference.log, run.log, tolerance)
        reasons += [judgement.withheld] if judgement.withheld else []
    timed = len(reference.times_ms("iteration", warmup)), len(run.times_ms("iteration", warmup))
    return Pair(run, reference, judgement, (*reasons, *timing_reasons(timed, warmup)))


def _partner(run: Run, position: int, reference: PointRuns | None) -> Run | None:
    """The run of the reference that is nearest: finished, of the same campaign, the same repeat."""
    if reference is None:
        return None
    seed = run.settings.get("seed")
    candidates = [r for r in reference.runs if r.settings.get("seed") == seed]
    if run.study.gate.kind == "quality":
        candidates = candidates or reference.runs

    def distance(numbered: tuple[int, Run]) -> tuple[bool, bool, bool, int]:
        place, other = numbered
        is_repeat = run.repeat is not None and other.repeat == run.repeat
        is_done, is_near = other in reference.finished, other.campaign == run.campaign
        return (not is_done, not is_near, not is_repeat, abs(place - position))

    return min(enumerate(candidates), key=distance)[1] if candidates else None


def _equals_other_engine(
    point: PointRuns, points: Sequence[PointRuns]
) -> tuple[tuple[str, bool], ...]:
    """What each run comes to against the engine that its own must equal bit for bit, and whether.

    An engine names that other engine in ``equals``, whatever the gate asks for; empty for one that
    names none.
    """
    row = point.study.engines.get(point.engine or "")
    if row is None or not row.equals or point.runs[0].source != MEASURED:
        return ()
    others = [g for g in points if g.engine == row.equals and g.key == point.key]
    return tuple(_equals(run, row.equals, others) for run in point.runs)


def _equals(run: Run, name: str, others: Sequence[PointRuns]) -> tuple[str, bool]:
    seed, length = run.settings.get("seed"), len(run.log.iterations)
    candidates = [
        other
        for point in others
        for other in point.finished
        if other.settings.get("seed") == seed and len(other.log.iterations) == length
    ]
    if not run.finished or not length:
        return f"not compared with {name}: run {run.status or _NOTHING_TO_COMPARE}", False
    if not candidates:
        return f"not compared with {name}: no finished run of it with seed {seed}", False
    other = next((one for one in candidates if one.repeat == run.repeat), candidates[0])
    pair = judge_pair(other.log, run.log)
    words = {"equal": "equal to", "close": "only close to"}.get(pair.word, "differs from")
    detail = pair.text.removeprefix(pair.word) if pair.word else f" ({_NOTHING_TO_COMPARE})"
    # Printed digits cannot show that every bit is equal.
    return f"{words} {name}{detail}", pair.word == "equal" and pair.exact


# What runs were made with


def setup(run: Run) -> dict[str, str]:
    """Return code, commit, versions and processors of a run, as far as anybody noted them."""
    kept = run.provenance
    code, git, gpus, cpu = (kept.get(name) for name in ("code", "git", "gpus", "cpu"))
    found: dict[str, str] = {}
    if isinstance(code, dict) and code.get("sha256"):
        found["code"] = str(code["sha256"])
    if isinstance(git, dict) and git.get("commit"):
        found["commit"] = str(git["commit"])[:12]
        if git.get("dirty"):
            found["commit"] += " with changes"
            found["commit"] += (
                f" {str(changes)[:8]}" if (changes := git.get("changes_sha256")) else ""
            )
    if isinstance(gpus, list):
        texts = [f"{g.get('name')} (driver {g.get('driver')})" for g in gpus if isinstance(g, dict)]
        found["GPU"] = ", ".join(texts) or "none"
    if isinstance(cpu, dict):
        found["CPU"], found["cores"] = str(cpu.get("model")), str(cpu.get("cores_usable"))
    if device := " ".join(part for part in (run.log.device or "", run.hardware) if part):
        found["device"] = device
    return found | {name: text for name, text in versions(run).items() if text}


def versions(run: Run) -> dict[str, str]:
    """Return version by package; what the run itself imported goes before what was installed."""
    started = run.log.metrics.start.get("versions") if run.log.metrics else None
    merged: dict[str, Any] = {}
    for source in (run.provenance.get("versions"), started):
        merged |= source if isinstance(source, dict) else {}
    return {
        str(name): "not installed" if text is None else str(text) for name, text in merged.items()
    }


def differences(runs: Sequence[Run]) -> list[str]:
    """Return in what the runs' set-up differs: ``torch differs (2.11.0, 2.13.0)``.

    A time is a property of code, versions and machine together. Where only some runs say
    something, that is a difference too: the others are not known to be the same.
    """
    setups = [setup(run) for run in runs]
    if all("code" in found for found in setups):
        # The commit tells of files that no run executes.
        setups = [{key: text for key, text in found.items() if key != "commit"} for found in setups]
    texts = []
    for key in dict.fromkeys(key for found in setups for key in found):
        values = dict.fromkeys(found.get(key, "not known") for found in setups)
        if len(values) > 1:
            shown = (text if len(text) <= 60 else f"{text[:57]}..." for text in values)
            texts.append(f"{key} differs ({', '.join(shown)})")
    return texts


# Points


class Finding(NamedTuple):
    """A sentence of the report: whether a run, or a point over all its runs, is valid."""

    label: str
    verdict: str
    holds: bool


@dataclass(frozen=True)
class PointComparison:
    """A point and the reference engine's point that it is held against."""

    ours: PointRuns
    reference: PointRuns | None
    pairs: list[Pair]
    """Each run of ``ours`` with a run of ``reference``."""
    warmup: int
    equals: tuple[tuple[str, bool], ...] = ()
    """Of each run of ``ours``, where its engine must equal another one."""
    _ratios: dict[str, Ratio | None] = field(default_factory=dict)

    @property
    def study(self) -> Study:
        """What says how to judge."""
        return self.ours.study

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
        reasons = self._reasons_of_pairs()
        if self._over_seeds and self._over_seeds.withheld:
            reasons.append(self._over_seeds.withheld)
        reasons += [text for text, holds in self.equals if not holds]
        reasons += self._reasons_of_setup()
        if not reasons and self.ratio("iteration") is None:
            reasons.append("no iteration times on both sides")
        return "; ".join(dict.fromkeys(reasons))

    @property
    def findings(self) -> list[Finding]:
        """What the gate finds, then a sentence for each run that must equal another engine's."""
        others = zip(self.ours.runs, self.equals, strict=False)
        return [*self._of_gate, *(Finding(run.label, *found) for run, found in others)]

    @property
    def _of_gate(self) -> list[Finding]:
        """A sentence for each run, or one for all where the gate judges them together."""
        judged, label = self._over_seeds, self.ours.label
        if judged is None:
            return [Finding(pair.run.label, pair.verdict, pair.holds) for pair in self.pairs]
        if not judged.word:
            return [Finding(label, f"{NOT_COMPARED}: {judged.withheld}", holds=False)]
        problems = [pair.problem for pair in self.pairs if pair.problem]
        problems += [f"loss: {run.loss.text}" for run in self.ours.runs if run.loss.failed]
        parts = [*dict.fromkeys(problems), judged.text, _gate_words(self.study, judged)]
        return [Finding(label, "; ".join(parts), judged.passes and not problems)]

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
        """Return the reference's median over ours; None where a side has no times."""
        if phase not in self._ratios:
            self._ratios[phase] = self._make_ratio(phase)
        return self._ratios[phase]

    def speedup(self, phase: str) -> float | None:
        """Return the ratio where it may be claimed."""
        ratio = self.ratio(phase)
        return ratio.ratio if ratio and not self.withheld else None

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

    def _reasons_of_pairs(self) -> list[str]:
        """Reasons of each repeat; those that not all share say which repeat they are of."""
        found: dict[str, list[str]] = {}
        for number, pair in enumerate(self.pairs, start=1):
            for reason in [pair.problem] if pair.problem else pair.reasons:
                found.setdefault(reason, []).append(str(number))
        count = len(self.pairs)
        return [
            text if len(numbers) == count else f"repeat {', '.join(numbers)}: {text}"
            for text, numbers in found.items()
        ]

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
        return [*reasons, ON_CPU] if any(run.log.on_cpu for run in runs) else reasons


def compare_points(
    runs: Sequence[Run], warmup: int, tolerance: float = DEFAULT_TOLERANCE
) -> list[PointComparison]:
    """Hold every point against the reference engine's, in the order of the runs."""
    groups = group_points(runs)
    found = []
    for group in groups:
        if group.engine in (group.study.reference, None) or group.runs[0].source == PUBLISHED:
            continue
        reference = reference_of(group, groups)
        pairs = pair_up(group, reference, warmup, tolerance)
        equals = _equals_other_engine(group, groups)
        found.append(PointComparison(group, reference, pairs, warmup, equals))
    return found


def timed_phases(study: Study) -> tuple[str, ...]:
    """Return ``iteration`` and the study's phases."""
    return ("iteration", *study.phases)


def _shown_fields(study: Study) -> list[str]:
    """Fields in which a point and its reference may differ."""
    free = [name for name, row in study.fields.items() if row.in_pairs != "same"]
    return list(dict.fromkeys([*engine_fields(study), *free]))


def comparison_columns(study: Study) -> dict[str, str]:
    """Return the columns of ``comparisons.csv`` and their types.

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


def write_comparisons(comparisons: Sequence[PointComparison], study: Study, out: Path) -> Path:
    """Write ``comparisons.csv`` and the Parquet file beside it; older ones of ours are replaced.

    Returns:
        The CSV.

    Raises:
        LogError: a file of that name is not one of ours, or the folder cannot be written.
    """
    path = out / "comparisons.csv"
    rows = [_row(item, phase) for item in comparisons for phase in timed_phases(study)]
    with writing(out):
        check_ours(path, "case")
        write_table(path, rows, comparison_columns(study))
    return path


def _row(item: PointComparison, phase: str) -> dict[str, Any]:
    run, study, ratio = item.ours.runs[0], item.study, item.ratio(phase)
    row: dict[str, Any] = {
        **{name: run.settings.get(name) for name in _shown_fields(study)},
        "case": run.case or None,
        "engine": item.ours.engine,
        "label": item.ours.label,
        "reference_label": item.reference.label if item.reference else None,
        "phase": phase,
        "equality": item.equality,
        "speedup": item.speedup(phase),
        "withheld": item.withheld or None,
        "warmup_iterations": run.warmup(item.warmup),
        "source": run.source,
        "reference": study.reference,
        "gate": study.gate.kind,
        "verdict": item.verdict,
    }
    for side, point in (("", item.ours), ("reference_", item.reference)):
        found = spread(point.times_ms(phase, item.warmup)) if point else None
        row[f"{side}repeats"] = found.repeats if found else 0
        row[f"{side}iterations"] = found.iterations if found else 0
        if found:
            name = side or "ours_"
            row |= {f"{name}ms": found.median_ms, f"{name}iqr_ms": found.iqr_ms}
            row[f"{name}mean_ms"] = found.mean_ms
    if ratio:
        row |= {"ratio": ratio.ratio, "ratio_low": ratio.low, "ratio_high": ratio.high}
        row |= {"paired": "yes" if ratio.paired else "no", "interval_covers": ratio.covers or None}
    return row
