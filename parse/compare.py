"""Points against their reference over all repeats: ``tables/comparisons.csv``.

Validity first, then speed: a speed-up stands where the study's gate lets every repeat pass, on the
same code and machine, and not on a CPU. Otherwise the ratio is there and the speed-up is withheld,
with all the reasons. ``bitwise`` and ``close`` gates judge run by run, ``quality`` judges over all
seeds of a point.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from configs.sources import MEASURED, PUBLISHED, SIMULATED
from configs.study import Gate, Study
from parse.log import METRICS_FILE
from parse.records import Log, as_number, as_table
from parse.run import PointRuns, Run, group_points
from parse.stats import Ratio, ratio_of_medians, reach_of_mean, spread
from parse.tables import engine_fields, run_row, write_table, writing
from parse.verdict import (
    ON_CPU,
    both_exact,
    common_losses,
    in_common,
    judge_pair,
    log_reasons,
    loss_reasons,
    timing_reasons,
)

NOT_COMPARED = "not compared"
NO_SPEEDUP = "simulated: a predicted ratio, not a measured speed-up"
"""Why predictions never make a speed-up."""
_NOTHING_TO_COMPARE = "no iteration to compare"
_WORST_FIRST = ("differs", NOT_COMPARED, "undecided", "close", "equal")
_COUNTED = {"iterations": "number of iterations"}
_AGAINST = {"equal": "equal to", "close": "close to", "differs": "differs from"}


# The gate


class Judgement(NamedTuple):
    """A gate's judgement of a run, or of all runs of a point, against the reference."""

    word: str
    """``equal``, ``close``, ``differs`` or ``undecided``; empty where nothing was compared."""
    text: str
    """The same with its figures, naming the reference, as a person reads it."""
    withheld: str
    """Why there is no speed-up; empty where the gate lets one pass."""

    @property
    def passes(self) -> bool:
        """True where the gate lets a speed-up pass."""
        return not self.withheld


def judge_runs(gate: Gate, name: str, reference: Log, ours: Log) -> Judgement:
    """Judge a run against a run of the reference engine, for a ``bitwise`` or ``close`` gate.

    Args:
        gate: What must hold.
        name: The reference engine's.
        reference: Its run.
        ours: The run to judge.
    """
    if gate.kind == "close":
        return _judge_closeness(gate, name, reference, ours)
    pair = judge_pair(reference, ours)
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

    A seed decides weights and samples, so that the two runs of one have much in common: the
    interval is that of the differences seed by seed.

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
        # Repeats of a seed are no more samples of how training turns out.
        sides.append({s: fmean(v for v in values if v is not None) for s, values in side.items()})
    pairs = [(sides[0][seed], mine) for seed, mine in sides[1].items() if seed in sides[0]]
    if len(pairs) < gate.seeds:
        what = f"{len(pairs)} seeds of both the run and {name}"
        return Judgement("", "", f"{what}, the gate asks for {gate.seeds} at least")
    theirs, mine = (fmean(side) for side in zip(*pairs, strict=True))
    off, reach = mine - theirs, reach_of_mean([[b - a for a, b in pairs]], gate.confidence)
    low, high = off - reach, off + reach
    figures = (
        f"mean {gate.metric} {mine:.6g} over {len(pairs)} seeds against {theirs:.6g} over the "
        f"same, difference {off:+.3g}, {gate.confidence:.0%} interval {low:+.3g} to {high:+.3g}, "
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
        pairs = in_common(reference, ours, lambda record: record.printed.get("grad_norm"))
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


# Pairs of runs


class Finding(NamedTuple):
    """A sentence of the report: whether a run, or a point over all its runs, is valid."""

    label: str
    verdict: str
    holds: bool


class Pair(NamedTuple):
    """A run and the run of the reference engine that it is compared with."""

    run: Run
    reference: Run | None
    """None when there is no run of the reference engine at the same point."""
    judgement: Judgement | None = None
    """The gate's judgement, if it judges run by run; None when one side has no iterations."""
    reasons: tuple[str, ...] = ()
    """Why the figures of the two allow no speed-up."""

    @property
    def word(self) -> str:
        """``equal``, ``close``, ``differs``; empty unless two finished runs were compared."""
        return "" if self.judgement is None or self.problem else self.judgement.word

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

    @property
    def finding(self) -> Finding:
        """``equal to REFERENCE (...)``, ``differs from ...``, or why there is no verdict.

        It holds where the run finished, trained and is what its study expects of it.
        """
        run, problem, judgement, study = self.run, self.problem, self.judgement, self.run.study
        if judgement is None or not judgement.word:
            reason = problem or (judgement.withheld if judgement else _NOTHING_TO_COMPARE)
            return Finding(run.label, f"{NOT_COMPARED}: {reason}", holds=False)
        if problem:
            parts = [f"{problem}; as far as it got {judgement.text}"]
        else:
            parts = [judgement.text, _gate_words(study, judgement)]
        parts += [f"loss: {run.loss.text}"] if run.loss.word != "trains" else []
        row = study.engines.get(run.engine or "")
        as_expected = judgement.passes
        if study.gate.kind == "bitwise":
            as_expected = judgement.word == "equal" or (row is not None and not row.exact)
        holds = as_expected and not problem and not run.loss.failed
        return Finding(run.label, "; ".join(parts), holds)


def _gate_words(study: Study, judgement: Judgement) -> str:
    return f"gate {study.gate.kind} {'passed' if judgement.passes else 'not passed'}"


def reference_of(group: PointRuns, groups: Sequence[PointRuns]) -> PointRuns | None:
    """Return the point of the reference engine to compare a point with; None if there is none.

    Prefer a point with identical settings, then one whose settings give equal results. Of its runs,
    prefer those of the same sweep.
    """
    same = [g for g in groups if g.engine == group.study.reference and g.key == group.key]
    exact = [g for g in same if g.preferred == group.preferred] or same
    found = next((g for g in exact if g.finished), exact[0] if exact else None)
    sweep_dirs = {run.sweep_dir for run in group.runs}
    near = [run for run in found.finished if run.sweep_dir in sweep_dirs] if found else []
    return replace(found, runs=near) if found and near else found


def pair_up(group: PointRuns, reference: PointRuns | None, warmup: int) -> list[Pair]:
    """Hold each run of a point against a run of the reference, in the order of the runs.

    The same repeat in the same sweep's folder where it finished; else any that did: all of one
    seed and data compute the same.
    """
    pairs = []
    for position, run in enumerate(group.runs):
        partner = _partner(run, position, reference)
        comparable = partner and partner.log.iterations and run.log.iterations
        if partner and comparable and run.source == MEASURED:
            pairs.append(_judged(run, partner, warmup))
        else:
            pairs.append(Pair(run, partner))
    return pairs


def _judged(run: Run, reference: Run, warmup: int) -> Pair:
    study, judgement = run.study, None
    reasons = loss_reasons((study.reference, str(run.engine)), (reference.loss, run.loss))
    if study.gate.kind != "quality":
        judgement = judge_runs(study.gate, study.reference, reference.log, run.log)
        gap = _gap_in_metrics(run, reference) if study.gate.kind == "bitwise" else ""
        if gap and judgement.word == "differs":
            reasons.append(gap)
        elif gap:
            judgement = Judgement("", "", gap)
        reasons += [judgement.withheld] if judgement.withheld else []
    if run is not reference and not (run.run_json or reference.run_json):
        reasons += log_reasons(reference.log, run.log)
    timed = [len(one.times_ms("iteration", warmup)) for one in (reference, run)]
    return Pair(run, reference, judgement, (*reasons, *timing_reasons(timed, warmup)))


def _gap_in_metrics(run: Run, reference: Run) -> str:
    """Say what the ``metrics.jsonl`` of either lacks, so that not every bit can be compared."""
    sides = ((run, reference, ""), (reference, run, f"{reference.engine}'s "))
    for one, other, whose in sides:
        gap = one.gap_in_metrics or _missing_norms(one.log, other.log)
        if gap:
            return f"{whose}{METRICS_FILE} is incomplete: {gap}"
        if one.recorded("metrics") and not one.log.metrics and other.log.metrics:
            return f"{whose}{METRICS_FILE} is missing or does not fit the log"
    return ""


def _missing_norms(log: Log, other: Log) -> str:
    """Say how many norms a run has, where it has some and lacks others that the other run has.

    An engine that gives none at all, and updates that were skipped, lack nothing.
    """
    own, theirs = (
        {r.iteration for r in one.iterations if as_number(r.event.get("grad_norm")) is not None}
        for one in (log, other)
    )
    common = {r.iteration for r in log.iterations if not r.event.get("skipped")} & theirs
    if not own or common <= own:
        return ""
    return f"gradient norms of {len(common & own)} of {len(common)} iterations"


def _partner(run: Run, position: int, reference: PointRuns | None) -> Run | None:
    """The run of the reference that is nearest: finished, in the same folder, the same repeat."""
    if reference is None:
        return None
    seed = run.settings.get("seed")
    candidates = [r for r in reference.runs if r.settings.get("seed") == seed]
    if run.study.gate.kind == "quality":
        candidates = candidates or reference.runs

    def distance(numbered: tuple[int, Run]) -> tuple[bool, bool, bool, int]:
        place, other = numbered
        is_repeat = run.repeat is not None and other.repeat == run.repeat
        is_done, is_near = other in reference.finished, other.sweep_dir == run.sweep_dir
        return (not is_done, not is_near, not is_repeat, abs(place - position))

    return min(enumerate(candidates), key=distance)[1] if candidates else None


def _equal_to_other_engine(point: PointRuns, points: Sequence[PointRuns]) -> list[Finding]:
    """Say of each run what it comes to against the engine that its own must equal bit for bit.

    An engine names that other engine in ``equals``, whatever the gate asks for; empty for one that
    names none.
    """
    row = point.study.engines.get(point.engine or "")
    if row is None or not row.equals or point.runs[0].source != MEASURED:
        return []
    others = [g for g in points if g.engine == row.equals and g.key == point.key]
    finished = [run for group in others for run in group.finished]
    return [_equal_to(run, row.equals, finished) for run in point.runs]


def _equal_to(run: Run, name: str, finished: Sequence[Run]) -> Finding:
    seed, length = run.settings.get("seed"), len(run.log.iterations)
    others = [
        other
        for other in finished
        if other.settings.get("seed") == seed and len(other.log.iterations) == length
    ]
    if not run.finished or not length:
        why = f"run {run.status or _NOTHING_TO_COMPARE}"
        return Finding(run.label, f"not compared with {name}: {why}", holds=False)
    if not others:
        why = f"no finished run of it with seed {seed}"
        return Finding(run.label, f"not compared with {name}: {why}", holds=False)
    other = next((other for other in others if other.repeat == run.repeat), others[0])
    if gap := _gap_in_metrics(run, other):
        return Finding(run.label, f"not compared with {name}: {gap}", holds=False)
    pair = judge_pair(other.log, run.log)
    words = {"equal": "equal to", "close": "only close to"}.get(pair.word, "differs from")
    detail = pair.text.removeprefix(pair.word) if pair.word else f" ({_NOTHING_TO_COMPARE})"
    # Printed digits cannot show that every bit is equal.
    holds = pair.word == "equal" and pair.exact
    return Finding(run.label, f"{words} {name}{detail}", holds)


# What runs were made with


def setup(run: Run) -> dict[str, str]:
    """Return code, commit, processors and versions of a run, as far as anybody noted them.

    Of versions, what the run itself imported goes before what was installed.
    """
    kept = run.provenance
    code, git, cpu = (as_table(kept.get(name)) for name in ("code", "git", "cpu"))
    found: dict[str, str] = {}
    if code.get("sha256"):
        found["code"] = str(code["sha256"])
    if git.get("commit"):
        changes = str(git.get("changes_sha256") or "")[:8]
        words = [str(git["commit"])[:12], *(["with changes", changes] if git.get("dirty") else [])]
        found["commit"] = " ".join(filter(None, words))
    if "gpus" in kept:
        texts = [f"{gpu.get('name')} (driver {gpu.get('driver')})" for gpu in run.gpus]
        found["GPU"] = ", ".join(texts) or "none"
    if cpu:
        found["CPU"], found["cores"] = str(cpu.get("model")), str(cpu.get("cores_usable"))
    if device := " ".join(part for part in (run.log.device or "", run.hardware) if part):
        found["device"] = device
    started = run.log.metrics.start.get("versions") if run.log.metrics else None
    for name, text in (as_table(kept.get("versions")) | as_table(started)).items():
        found[str(name)] = "not installed" if text is None else str(text)
    return found


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


@dataclass(frozen=True)
class PointComparison:
    """A point and the reference engine's point that it is compared with."""

    ours: PointRuns
    reference: PointRuns | None
    pairs: list[Pair]
    """Each run of ``ours`` with a run of ``reference``."""
    warmup: int
    equality: str
    """The worst word of all repeats: ``equal``, ``close``, ``differs``, ``not compared``."""
    findings: list[Finding]
    """The gate's findings, then a sentence for each run that must equal another engine's."""
    verdict: str
    """The gate's verdict over all repeats."""
    withheld: str
    """Why there is no speed-up, all reasons in a line; empty where there is one."""
    ratios: dict[str, Ratio | None]
    """The reference's median over ours by phase; None where a side has no times."""

    def speedup(self, phase: str) -> float | None:
        """Return the ratio where it may be claimed."""
        ratio = self.ratios[phase]
        return ratio.ratio if ratio and not self.withheld else None


def compare_points(runs: Sequence[Run], warmup: int) -> list[PointComparison]:
    """Hold every point against the reference engine's, in the order of the runs."""
    groups = group_points(runs)
    return [
        _compared(group, reference_of(group, groups), groups, warmup)
        for group in groups
        if group.engine not in (group.study.reference, None) and group.runs[0].source != PUBLISHED
    ]


def _compared(
    ours: PointRuns, reference: PointRuns | None, points: Sequence[PointRuns], warmup: int
) -> PointComparison:
    pairs = pair_up(ours, reference, warmup)
    over_seeds = _over_seeds(ours, reference, pairs, warmup)
    other_engine = _equal_to_other_engine(ours, points)
    ratios = {p: _ratio(ours, reference, p, warmup) for p in timed_phases(ours.study)}
    words = {pair.word or NOT_COMPARED for pair in pairs}
    equality = next(word for word in _WORST_FIRST if word in words)
    findings = [pair.finding for pair in pairs]
    reasons = _reasons_of_pairs(pairs)
    if over_seeds:
        equality = over_seeds.word or NOT_COMPARED
        findings = [_finding_over_seeds(ours, pairs, over_seeds)]
        reasons += [over_seeds.withheld] if over_seeds.withheld else []
    reasons += [finding.verdict for finding in other_engine if not finding.holds]
    reasons += _reasons_of_setup(ours, reference)
    if not reasons and ratios["iteration"] is None:
        reasons.append("no iteration times on both sides")
    is_predicted = ours.runs[0].source == SIMULATED and reference is not None
    withheld = NO_SPEEDUP if is_predicted else "; ".join(dict.fromkeys(reasons))
    verdict, every = _over_repeats(findings), [*findings, *other_engine]
    return PointComparison(
        ours, reference, pairs, warmup, equality, every, verdict, withheld, ratios
    )


def _over_repeats(findings: Sequence[Finding]) -> str:
    """The verdict of a point over its repeats."""
    first, holding = findings[0], sum(finding.holds for finding in findings)
    if len(findings) == 1:
        return first.verdict
    if holding == len(findings):
        return f"{first.verdict}, in each of {holding} repeats"
    worst = next(finding for finding in findings if not finding.holds)
    return f"{worst.verdict}; {holding} of {len(findings)} repeats are valid"


def _over_seeds(
    ours: PointRuns, reference: PointRuns | None, pairs: Sequence[Pair], warmup: int
) -> Judgement | None:
    """The judgement of a gate that judges all seeds together; None for any other gate."""
    gate = ours.study.gate
    if gate.kind != "quality":
        return None
    if reference is None or ours.runs[0].source == SIMULATED:
        return Judgement("", "", pairs[0].problem)
    sides: list[dict[object, list[float | None]]] = [{}, {}]
    for side, point in zip(sides, (reference, ours), strict=True):
        for run in point.finished:
            value = as_number(run_row(run, warmup).get(gate.metric))
            side.setdefault(run.settings.get("seed"), []).append(value)
    return judge_seeds(gate, ours.study.reference, *sides)


def _finding_over_seeds(ours: PointRuns, pairs: Sequence[Pair], judged: Judgement) -> Finding:
    if not judged.word:
        return Finding(ours.label, f"{NOT_COMPARED}: {judged.withheld}", holds=False)
    problems = [pair.problem for pair in pairs if pair.problem]
    problems += [f"loss: {run.loss.text}" for run in ours.runs if run.loss.failed]
    parts = [*dict.fromkeys(problems), judged.text, _gate_words(ours.study, judged)]
    return Finding(ours.label, "; ".join(parts), judged.passes and not problems)


def _ratio(ours: PointRuns, reference: PointRuns | None, phase: str, warmup: int) -> Ratio | None:
    if reference is None:
        return None
    theirs, mine = (point.times_ms(phase, warmup) for point in (reference, ours))
    known, others = reference.repeats, ours.repeats
    # A sweep runs repeat 1 of all engines, then repeat 2, so what slowed down both cancels.
    alternate = None not in known and len(set(known)) == len(known) and known == others
    return ratio_of_medians(theirs, mine, paired=alternate and all(theirs) and all(mine))


def _reasons_of_pairs(pairs: Sequence[Pair]) -> list[str]:
    """Reasons of each repeat; those that not all share say which repeat they are of."""
    found: dict[str, list[str]] = {}
    for number, pair in enumerate(pairs, start=1):
        for reason in [pair.problem] if pair.problem else pair.reasons:
            found.setdefault(reason, []).append(str(number))
    return [
        text if len(numbers) == len(pairs) else f"repeat {', '.join(numbers)}: {text}"
        for text, numbers in found.items()
    ]


def _reasons_of_setup(point: PointRuns, reference: PointRuns | None) -> list[str]:
    if reference is None:
        return []
    ours, other = point.runs[0].settings, reference.runs[0].settings
    reasons = [
        f"{point.study.reference} has another {_COUNTED.get(name, name)} "
        f"({other.get(name)} for {ours.get(name)})"
        for name, row in point.study.all_fields.items()
        if row.in_pairs == "prefer" and other.get(name) != ours.get(name)
    ]
    runs = [*point.finished, *reference.finished]
    reasons += differences(runs)
    return [*reasons, ON_CPU] if any(run.log.on_cpu for run in runs) else reasons


def timed_phases(study: Study) -> tuple[str, ...]:
    """Return ``iteration`` and the study's phases."""
    return ("iteration", *study.phases)


def _shown_fields(study: Study) -> list[str]:
    """Fields in which a point and its reference may differ."""
    free = [name for name, row in study.fields.items() if row.in_pairs != "same"]
    return list(dict.fromkeys([*engine_fields(study), *free]))


def comparison_columns(study: Study) -> list[str]:
    """Return the columns of ``comparisons.csv``.

    ``*_ms`` are medians after the warm-up where no name says otherwise; ``ratio`` is the
    reference's over ours, so above 1 where ours is faster; ``repeats`` and ``iterations`` count
    ours; ``speedup`` is the ratio where it may be claimed; ``gate`` is the kind of the study's
    gate, and ``verdict`` what it found.
    """
    return [
        *("case", "engine", *_shown_fields(study), "label", "reference_label", "repeats"),
        *("iterations", "phase", "reference_ms", "ours_ms", "reference_iqr_ms", "ours_iqr_ms"),
        *("ratio", "ratio_low", "ratio_high", "paired", "equality", "speedup", "withheld"),
        *("warmup_iterations", "interval_covers", "reference_mean_ms", "ours_mean_ms"),
        *("reference_repeats", "reference_iterations", "source", "reference", "gate", "verdict"),
    ]


def write_comparisons(comparisons: Sequence[PointComparison], study: Study, out: Path) -> Path:
    """Write ``comparisons.csv``, and return its path; an older one of ours is replaced.

    Raises:
        LogError: a file of that name is not one of ours, or the folder cannot be written.
    """
    path = out / "comparisons.csv"
    rows = [_row(item, phase) for item in comparisons for phase in timed_phases(study)]
    with writing(out):
        write_table(path, rows, comparison_columns(study))
    return path


def _row(item: PointComparison, phase: str) -> dict[str, Any]:
    run, study, ratio = item.ours.runs[0], item.ours.study, item.ratios[phase]
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
