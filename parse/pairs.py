"""Which runs of a sweep are compared, and what is said of each pair."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from parse.compare import Comparison, compare
from parse.run_folder import Run
from parse.verdict import DEFAULT_TOLERANCE

_VANILLA = "vanilla"
_FREE = ("name", "engine", "stride", "subgroup_numel", "offload_ratio", "data_prefix", "iterations")
"""Fields of a point that may differ in a pair: none of them changes what is computed."""
_PREFERRED = ("subgroup_numel", "offload_ratio", "iterations")
"""Of those, the ones that a vanilla run should rather share: they change times."""
_NAMED = ("model", "tp", "dp", "global_batch_size", "micro_batch_size", "seq_length")
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
    def equal(self) -> bool:
        """Whether the run finished and is equal to a finished vanilla run."""
        if self.vanilla is None or self.result is None:
            return False
        finished = self.run.finished and self.vanilla.finished
        return finished and self.result.pair.word == "equal"

    @property
    def verdict(self) -> str:
        """``equal to vanilla (...)``, ``differs from vanilla ...`` or why there is no verdict."""
        problem = self._problem()
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

    def _problem(self) -> str:
        if self.vanilla is None:
            return "no vanilla run of this point"
        for name, run in (("run", self.run), ("vanilla run", self.vanilla)):
            if not run.finished:
                return f"{name} {run.status}" + (f" ({run.cause})" if run.cause else "")
            if not run.log.iterations:
                return f"{name} has no complete iteration in its log"
        return ""


def make_pairs(
    runs: Sequence[Run], warmup: int, tolerance: float = DEFAULT_TOLERANCE
) -> list[Pair]:
    """Hold every plugin run against the vanilla run of the same point, in the order given.

    The n-th repeat of a point is held against the n-th vanilla run of it, where there is one.
    """
    repeats: dict[str, int] = {}
    pairs = []
    for run in runs:
        if run.log.engine in (_VANILLA, None):
            continue
        identity = json.dumps([_key(run), run.log.engine_label, _preferred(run)], default=str)
        number = repeats[identity] = repeats.get(identity, -1) + 1
        vanilla = _partner(run, runs, number)
        both = vanilla is not None and vanilla.log.iterations and run.log.iterations
        result = compare(vanilla.log, run.log, warmup, tolerance) if vanilla and both else None
        pairs.append(Pair(run, vanilla, result))
    return pairs


def _partner(run: Run, runs: Sequence[Run], number: int) -> Run | None:
    same = [r for r in runs if r.log.engine == _VANILLA and _key(r) == _key(run)]
    exact = [r for r in same if _preferred(r) == _preferred(run)] or same
    return exact[min(number, len(exact) - 1)] if exact else None


def _key(run: Run) -> str:
    """What must agree for two runs to compute the same."""
    if run.point:
        fixed = {key: value for key, value in run.point.items() if key not in _FREE}
    else:
        fixed = {key: run.log.settings.get(key) for key in _NAMED}
    return json.dumps(fixed, sort_keys=True, default=str)


def _preferred(run: Run) -> list[object]:
    return [run.point.get(key, run.log.settings.get(key)) for key in _PREFERRED]
