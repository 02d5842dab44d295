"""Which runs are repeats of one point, and which points and runs are held against each other."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from configs.naming import Namer
from configs.study import Study
from parse.compare.gate import NOTHING_TO_COMPARE, Judgement, judge_runs
from parse.compare.two_runs import loss_reasons, timing_reasons
from parse.compare.verdict import DEFAULT_TOLERANCE
from parse.labels import free_by_gate
from parse.run_folder import Run
from parse.unmeasured import MEASURED


@dataclass(frozen=True)
class Pair:
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
        gate = self.run.study.gate
        if self.judgement is None or self.problem or self.run.loss.failed:
            return False
        row = self.run.study.engines.get(self.run.engine or "")
        as_said = self.word == "equal" or (row is not None and not row.exact)
        return as_said if gate.kind == "bitwise" else self.judgement.passes

    @property
    def verdict(self) -> str:
        """``equal to REFERENCE (...)``, ``differs from ...``, or why there is no verdict."""
        problem, judgement = self.problem, self.judgement
        if judgement is None or not judgement.word:
            reason = problem or (judgement.withheld if judgement else NOTHING_TO_COMPARE)
            return f"not compared: {reason}"
        parts = [judgement.text if not problem else f"{problem}; as far as it got {judgement.text}"]
        parts += [] if problem else [gate_words(self.run.study, judgement)]
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


def gate_words(study: Study, judgement: Judgement) -> str:
    """``gate bitwise passed``."""
    return f"gate {study.gate.kind} {'passed' if judgement.passes else 'not passed'}"


@dataclass
class PointRuns:
    """All repeats of one point: one engine, one set of settings."""

    runs: list[Run]
    label: str
    """Name of the point, unique among those grouped together."""

    @property
    def engine(self) -> str | None:
        """Name of the engine; None when not recorded."""
        return self.runs[0].engine

    @cached_property
    def key(self) -> str:
        """What must agree for two points to compute the same."""
        return point_key(self.runs[0])

    @cached_property
    def preferred(self) -> list[object]:
        """What two points should agree in for their times to be comparable."""
        run = self.runs[0]
        names = [name for name, row in run.study.all_fields.items() if row.in_pairs == "prefer"]
        return [run.settings.get(name) for name in names]

    @property
    def finished(self) -> list[Run]:
        """Runs whose times count, by campaign, seed and repeat."""
        return sorted((r for r in self.runs if r.finished and r.log.iterations), key=_place)

    @property
    def repeats(self) -> list[tuple[object, ...] | None]:
        """Campaign, seed and repeat of each finished run, as its sweep counted them."""
        return [_place(run) if run.repeat else None for run in self.finished]

    def times_ms(self, phase: str, warmup: int) -> list[list[float]]:
        """Durations of a phase after the warm-up, one list a finished run, in ms."""
        return [run.times_ms(phase, warmup) for run in self.finished]


def _place(run: Run) -> tuple[str, str, int]:
    return str(run.campaign), str(run.settings.get("seed")), run.repeat or 0


def group_points(runs: Sequence[Run]) -> list[PointRuns]:
    """Gather the repeats of each point, in the order of their first runs."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(_identity(run), []).append(run)
    names = [_name(members) for members in groups.values()]
    return [
        PointRuns(members, name if names.count(name) == 1 else members[0].label)
        for members, name in zip(groups.values(), names, strict=True)
    ]


def reference_of(group: PointRuns, groups: Sequence[PointRuns]) -> PointRuns | None:
    """The reference engine's point that a point is held against.

    That of the same settings; else one that computes the same with other settings of those that
    should agree; None when there is none. Of several campaigns, only the runs that were measured
    in one of the point's own, if there are any.
    """
    engine = group.runs[0].study.reference
    same = [g for g in groups if g.engine == engine and g.key == group.key]
    exact = [g for g in same if g.preferred == group.preferred] or same
    found = next((g for g in exact if g.finished), exact[0] if exact else None)
    campaigns = {run.campaign for run in group.runs}
    beside = [run for run in found.finished if run.campaign in campaigns] if found else []
    return PointRuns(beside, found.label) if found and beside else found


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
        both = partner is not None and partner.log.iterations and run.log.iterations
        if partner and both and run.source == MEASURED:
            pairs.append(_judged(run, partner, warmup, tolerance))
        else:
            pairs.append(Pair(run, partner))
    return pairs


def point_key(run: Run) -> str:
    """What must agree for two runs to compute the same."""
    free = _may_differ(run.study)
    fixed = {key: value for key, value in run.fields.items() if key not in free}
    fixed["source"] = run.source
    return json.dumps(fixed, sort_keys=True, default=str)


def _may_differ(study: Study) -> set[str]:
    """Fields in which a run may differ from its reference."""
    taken = study.engines[study.reference].fields
    free = {name for name, row in study.all_fields.items() if row.in_pairs != "same"}
    free |= {n for n, row in study.fields.items() if row.only_some_engines and n not in taken}
    return {"name", "engine", *free, *free_by_gate(study)}


def _identity(run: Run) -> str:
    """What the repeats of a point share."""
    rows = run.study.fields.items()
    values = [run.settings.get(name, row.default) for name, row in rows]
    return json.dumps([point_key(run), run.engine, values, run.settings.get("iterations")])


def _name(members: Sequence[Run]) -> str:
    """The name that all runs share; without what differs between seeds where they do not."""
    names = {run.name for run in members}
    first = members[0]
    if len(names) == 1:
        return first.name
    return " ".join([first.case, Namer(first.study).engine(first.fields)])


def _judged(run: Run, reference: Run, warmup: int, tolerance: float) -> Pair:
    study = run.study
    reasons = loss_reasons((study.reference, str(run.engine)), (reference.loss, run.loss))
    judgement = None
    if study.gate.kind != "quality":
        judgement = judge_runs(study.gate, study.reference, reference.log, run.log, tolerance)
        reasons += [judgement.withheld] if judgement.withheld else []
    timed = [len(one.times_ms("iteration", warmup)) for one in (reference, run)]
    reasons += timing_reasons((timed[0], timed[1]), warmup)
    return Pair(run, reference, judgement, tuple(reasons))


def _partner(run: Run, position: int, reference: PointRuns | None) -> Run | None:
    """The run of the reference that is nearest: finished, of the same campaign, the same repeat."""
    if reference is None:
        return None
    seed = run.settings.get("seed")
    known = [r for r in reference.runs if r.settings.get("seed") == seed]
    if run.study.gate.kind == "quality":
        known = known or reference.runs

    def distance(numbered: tuple[int, Run]) -> tuple[bool, bool, bool, int]:
        place, other = numbered
        is_repeat = run.repeat is not None and other.repeat == run.repeat
        is_done, is_beside = other in reference.finished, other.campaign == run.campaign
        return (not is_done, not is_beside, not is_repeat, abs(place - position))

    return min(enumerate(known), key=distance)[1] if known else None
