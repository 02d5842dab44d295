"""Which runs of a sweep are repeats of one point, and which points are compared."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from parse.compare.two_runs import Comparison, compare
from parse.compare.verdict import DEFAULT_TOLERANCE
from parse.log.records import Setting, values_ms
from parse.run_folder import Run
from parse.unmeasured import MEASURED

VANILLA = "vanilla"
_FREE = ("name", "engine", "stride", "subgroup_numel", "offload_ratio", "data_prefix", "iterations")
"""Fields of a point that may differ in a pair: none of them changes what is computed."""
TIMING_SETTINGS = ("subgroup_numel", "offload_ratio")
"""Of those, the ones that change times: a vanilla run should rather share them."""
_PREFERRED = (*TIMING_SETTINGS, "iterations")
"""What a vanilla run should rather share."""
_NAMED = (
    *("model", "tp", "dp", "global_batch_size", "micro_batch_size"),
    *("seq_length", "num_layers", "hidden", "heads"),
)
"""Settings that must agree where only the log's name says what was run."""


@dataclass(frozen=True)
class Pair:
    """A plugin mode and the vanilla run it is held against."""

    run: Run
    vanilla: Run | None
    """None when the sweep has no vanilla run of the same point."""
    result: Comparison | None
    """None when one side has no iterations."""

    @property
    def word(self) -> str:
        """``equal``, ``close``, ``differs``; empty unless two finished runs were compared."""
        if self.result is None or self.problem:
            return ""
        return self.result.pair.word

    @property
    def equal(self) -> bool:
        """Whether the run finished and is equal to a finished vanilla run."""
        return self.word == "equal"

    @property
    def verdict(self) -> str:
        """``equal to vanilla (...)``, ``differs from vanilla ...`` or why there is no verdict."""
        problem = self.problem
        if self.result is None or not self.result.pair.word:
            return f"not compared: {problem or 'no iteration that both have'}"
        pair = self.result.pair
        words = {"equal": "equal to", "close": "close to", "differs": "differs from"}
        text = f"{words[pair.word]} vanilla{pair.text.removeprefix(pair.word)}"
        if self.result.ours.word != "trains":
            text += f"; loss: {self.result.ours.text}"
        return f"{problem}; as far as it got {text}" if problem else text

    @property
    def line(self) -> str:
        """The verdict behind the run's name."""
        return f"{self.run.label}: {self.verdict}"

    @property
    def problem(self) -> str:
        """Why no verdict is possible, whatever the figures say; empty where one is."""
        if self.vanilla is None:
            return "no vanilla run of this point"
        if self.run.source != MEASURED:
            return f"{self.run.source}: there is no loss to compare"
        for name, run in (("run", self.run), ("vanilla run", self.vanilla)):
            if not run.finished:
                return f"{name} {run.status}" + (f" ({run.cause})" if run.cause else "")
            if not run.log.iterations:
                return f"{name} has no complete iteration in its log"
        return ""


@dataclass
class PointRuns:
    """All repeats of one point: one engine, one set of settings."""

    runs: list[Run]
    label: str
    """Name of the point, unique among those grouped together."""

    @property
    def engine(self) -> str | None:
        """``vanilla``, ``async-gradients`` or ``hybrid``; None when nobody says."""
        return self.runs[0].log.engine

    @property
    def settings(self) -> dict[str, Setting]:
        """Settings of the first run, which its repeats share."""
        return self.runs[0].log.settings

    @property
    def finished(self) -> list[Run]:
        """Runs whose times count."""
        return [run for run in self.runs if run.finished and run.log.iterations]

    @property
    def repeats(self) -> list[int | None]:
        """Number of each finished run among the repeats, as the sweep counted them."""
        return [run.repeat for run in self.finished]

    def times_ms(self, phase: str, warmup: int) -> list[list[float]]:
        """Durations of a phase after the warm-up, one list a finished run, in ms."""
        return [values_ms(run.log, phase, run.warmup(warmup)) for run in self.finished]


def group_points(runs: Sequence[Run]) -> list[PointRuns]:
    """Gather the repeats of each point, in the order of their first runs."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        identity = json.dumps([point_key(run), run.log.engine_label, preferred(run)], default=str)
        groups.setdefault(identity, []).append(run)
    names = [_name(members[0]) for members in groups.values()]
    return [
        PointRuns(members, name if names.count(name) == 1 else members[0].label)
        for members, name in zip(groups.values(), names, strict=True)
    ]


def reference_of(group: PointRuns, groups: Sequence[PointRuns]) -> PointRuns | None:
    """The vanilla point that a plugin point is held against.

    That of the same settings; else one that computes the same with another subgroup size, offload
    ratio or number of iterations; None when there is none.
    """
    own = group.runs[0]
    same = [g for g in groups if g.engine == VANILLA and point_key(g.runs[0]) == point_key(own)]
    exact = [g for g in same if preferred(g.runs[0]) == preferred(own)] or same
    return next((g for g in exact if g.finished), exact[0] if exact else None)


def pair_up(
    group: PointRuns, reference: PointRuns | None, warmup: int, tolerance: float = DEFAULT_TOLERANCE
) -> list[Pair]:
    """Hold each run of a point against a vanilla run, in the order of the runs.

    The same repeat where it finished; else any vanilla run that did: all of them compute the same.
    """
    pairs = []
    for position, run in enumerate(group.runs):
        vanilla = _partner(run, position, reference)
        both = vanilla is not None and vanilla.log.iterations and run.log.iterations
        has_losses = both and run.source == MEASURED
        result = (
            compare(vanilla.log, run.log, warmup, tolerance) if vanilla and has_losses else None
        )
        pairs.append(Pair(run, vanilla, result))
    return pairs


def make_pairs(
    runs: Sequence[Run], warmup: int, tolerance: float = DEFAULT_TOLERANCE
) -> list[Pair]:
    """Hold every plugin run against the vanilla run of the same point, in the order given."""
    groups = group_points(runs)
    pairs = [
        pair
        for group in groups
        if group.engine not in (VANILLA, None)
        for pair in pair_up(group, reference_of(group, groups), warmup, tolerance)
    ]
    position = {id(run): number for number, run in enumerate(runs)}
    return sorted(pairs, key=lambda pair: position[id(pair.run)])


def point_key(run: Run) -> str:
    """What must agree for two runs to compute the same."""
    if run.point:
        fixed = {key: value for key, value in run.point.items() if key not in _FREE}
    else:
        fixed = {key: run.log.settings.get(key) for key in _NAMED}
    fixed["source"] = run.source
    return json.dumps(fixed, sort_keys=True, default=str)


def preferred(run: Run) -> list[object]:
    """What two runs should agree in for their times to be comparable."""
    return _values(run, _PREFERRED)


def timing_values(run: Run) -> list[object]:
    """Values of :data:`TIMING_SETTINGS`."""
    return _values(run, TIMING_SETTINGS)


def _values(run: Run, names: Sequence[str]) -> list[object]:
    return [run.point.get(name, run.log.settings.get(name)) for name in names]


def _name(run: Run) -> str:
    return ", ".join(part for part in (run.case, run.log.engine_label) if part)


def _partner(run: Run, position: int, reference: PointRuns | None) -> Run | None:
    if reference is None:
        return None
    same = [r for r in reference.runs if run.repeat is not None and r.repeat == run.repeat]
    nth = same or reference.runs[min(position, len(reference.runs) - 1) :][:1]
    return next((r for r in (*nth, *reference.finished) if r in reference.finished), nth[0])
