"""Plugin points against their vanilla points over all repeats: ``tables/comparisons.csv``.

Validity first, then speed: a speed-up stands where every repeat is equal to vanilla, or close to
it, on the same code and machine, and not on a CPU. Otherwise the ratio is there and the speed-up is
withheld, with all the reasons.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from parse.compare.pairs import (
    TIMING_SETTINGS,
    VANILLA,
    Pair,
    PointRuns,
    group_points,
    pair_up,
    reference_of,
    timing_values,
)
from parse.compare.provenance import differences
from parse.compare.stats import Ratio, Spread, ratio_of_medians, spread
from parse.compare.two_runs import ON_CPU
from parse.compare.verdict import DEFAULT_TOLERANCE
from parse.errors import LogError
from parse.log.records import PHASES
from parse.run_folder import Run
from parse.unmeasured import NO_SPEEDUP, PUBLISHED, SIMULATED
from parse.write import Columns, write_table

TIMED_PHASES = ("iteration", *PHASES)
NOT_COMPARED = "not compared"

COLUMNS = {
    "case": "string",
    "engine": "string",
    "stride": "Int64",
    "offload_ratio": "Float64",
    "label": "string",
    "reference_label": "string",
    "repeats": "Int64",
    "iterations": "Int64",
    "phase": "string",
    **dict.fromkeys(("vanilla_ms", "ours_ms", "vanilla_iqr_ms", "ours_iqr_ms"), "Float64"),
    **dict.fromkeys(("ratio", "ratio_low", "ratio_high"), "Float64"),
    "paired": "string",
    "equality": "string",
    "speedup": "Float64",
    "withheld": "string",
    "warmup_iterations": "Int64",
    "interval_covers": "string",
    "vanilla_mean_ms": "Float64",
    "ours_mean_ms": "Float64",
    "vanilla_repeats": "Int64",
    "vanilla_iterations": "Int64",
    "source": "string",
}
"""Columns and their types. ``*_ms`` are medians after the warm-up where no name says otherwise;
``ratio`` is vanilla over ours, so above 1 where ours is faster; ``repeats`` and ``iterations``
count ours; ``speedup`` is the ratio where it may be claimed."""

_HEAD = b"case,engine,"


@dataclass(frozen=True)
class PointComparison:
    """A plugin point and the vanilla point it is held against."""

    ours: PointRuns
    reference: PointRuns | None
    pairs: tuple[Pair, ...]
    """Each run of ``ours`` with a run of ``reference``."""
    warmup: int

    @property
    def equality(self) -> str:
        """The worst word of all repeats: ``equal``, ``close``, ``differs``, ``not compared``."""
        words = {pair.word or NOT_COMPARED for pair in self.pairs}
        return next(w for w in ("differs", NOT_COMPARED, "close", "equal") if w in words)

    @cached_property
    def withheld(self) -> str:
        """Why there is no speed-up, all reasons in a line; empty where there is one."""
        if self.ours.runs[0].source == SIMULATED and self.reference is not None:
            return NO_SPEEDUP
        reasons = [*_reasons_of_pairs(self.pairs), *self._reasons_of_setup()]
        if not reasons and self.ratio("iteration") is None:
            reasons.append("no iteration times on both sides")
        return "; ".join(dict.fromkeys(reasons))

    def ours_spread(self, phase: str) -> Spread | None:
        """Statistics of the plugin's times of a phase."""
        return spread(self.ours.times_ms(phase, self.warmup))

    def vanilla_spread(self, phase: str) -> Spread | None:
        """Statistics of the reference's times of a phase."""
        return spread(self.reference.times_ms(phase, self.warmup)) if self.reference else None

    def ratio(self, phase: str) -> Ratio | None:
        """Vanilla's median over ours, with its interval; None where a side has no times."""
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

    def _make_ratio(self, phase: str) -> Ratio | None:
        if self.reference is None:
            return None
        vanilla = self.reference.times_ms(phase, self.warmup)
        ours = self.ours.times_ms(phase, self.warmup)
        paired = self._repeats_alternate and all((*vanilla, *ours))
        if paired:
            vanilla = [times for _, times in _in_order(self.reference.repeats, vanilla)]
            ours = [times for _, times in _in_order(self.ours.repeats, ours)]
        return ratio_of_medians(vanilla, ours, paired=paired)

    @property
    def _repeats_alternate(self) -> bool:
        """Whether both have the same repeats; a sweep runs repeat 1 of all, then repeat 2."""
        assert self.reference is not None
        own, other = self.ours.repeats, self.reference.repeats
        known = None not in own and len(set(own)) == len(own) == len(other)
        return known and set(own) == set(other)

    def _reasons_of_setup(self) -> list[str]:
        if self.reference is None:
            return []
        ours, vanilla = self.ours.runs[0], self.reference.runs[0]
        values = zip(TIMING_SETTINGS, timing_values(ours), timing_values(vanilla), strict=True)
        reasons = [f"vanilla has another {n} ({b} for {a})" for n, a, b in values if a != b]
        runs = [*self.ours.finished, *self.reference.finished]
        reasons += differences(runs)
        return [*reasons, ON_CPU] if any(run.on_cpu for run in runs) else reasons


def compare_points(
    runs: Sequence[Run], warmup: int, tolerance: float = DEFAULT_TOLERANCE
) -> list[PointComparison]:
    """Every plugin point against its vanilla point, in the order of the runs."""
    groups = group_points(runs)
    found = []
    for group in groups:
        if group.engine in (VANILLA, None) or group.runs[0].source == PUBLISHED:
            continue
        reference = reference_of(group, groups)
        pairs = tuple(pair_up(group, reference, warmup, tolerance))
        found.append(PointComparison(group, reference, pairs, warmup))
    return found


def comparisons_table(comparisons: Sequence[PointComparison]) -> Columns:
    """One row a comparison and phase."""
    rows = [_row(item, phase) for item in comparisons for phase in TIMED_PHASES]
    return {name: [row.get(name) for row in rows] for name in COLUMNS}


def write_comparisons(comparisons: Sequence[PointComparison], out: Path) -> Path:
    """Write ``comparisons.csv`` and the Parquet file beside it; older ones of ours are replaced.

    Returns:
        The CSV.

    Raises:
        LogError: a file of that name is not one of ours, or the folder cannot be written.
    """
    path = out / "comparisons.csv"
    try:
        out.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.read_bytes()[: len(_HEAD)] == _HEAD:
            raise LogError(f"{path}: not a table of this parser; choose another folder")
        write_table(path, comparisons_table(comparisons), COLUMNS)
    except OSError as error:
        raise LogError(f"{error.filename or out}: cannot be written: {error.strerror}") from None
    return path


def _row(item: PointComparison, phase: str) -> dict[str, Any]:
    ours, vanilla, ratio = item.ours_spread(phase), item.vanilla_spread(phase), item.ratio(phase)
    run, settings = item.ours.runs[0], item.ours.settings
    row: dict[str, Any] = {
        "case": run.case or None,
        "engine": item.ours.engine,
        "stride": settings.get("stride"),
        "offload_ratio": settings.get("offload_ratio"),
        "label": item.ours.label,
        "reference_label": item.reference.label if item.reference else None,
        "repeats": ours.repeats if ours else 0,
        "iterations": ours.iterations if ours else 0,
        "phase": phase,
        "equality": item.equality,
        "speedup": item.speedup(phase),
        "withheld": item.withheld or None,
        "warmup_iterations": run.warmup(item.warmup),
        "vanilla_repeats": vanilla.repeats if vanilla else 0,
        "vanilla_iterations": vanilla.iterations if vanilla else 0,
        "source": run.source,
    }
    for name, side in (("vanilla", vanilla), ("ours", ours)):
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
        withheld = pair.result.withheld if pair.result else None
        for reason in [pair.problem] if pair.problem else (withheld or "").split("; "):
            if reason:
                found.setdefault(reason, []).append(number)
    if len(pairs) == 1:
        return list(found)
    return [
        text if len(numbers) == len(pairs) else f"repeat {', '.join(map(str, numbers))}: {text}"
        for text, numbers in found.items()
    ]


def _in_order(
    repeats: Sequence[int | None], times: list[list[float]]
) -> list[tuple[int, list[float]]]:
    numbered = ((r, t) for r, t in zip(repeats, times, strict=True) if r is not None)
    return sorted(numbered, key=lambda item: item[0])
