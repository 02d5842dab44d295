"""The regression gate: ``python -m parse compare OLD NEW``, for CI.

Exit code 0 without a regression, 1 with one, 2 when the sides cannot be compared.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from configs.cli import Parser, add_warmup, number_from_0, say
from configs.files import printable
from parse.compare import compare_points, timed_phases
from parse.records import LogError
from parse.run import (
    MEASURED,
    SWEEP_FILE,
    PointRuns,
    Run,
    find_logs,
    group_points,
    label_runs,
    read_run,
    read_sweep,
)
from parse.stats import INSIDE_A_RUN, Spread, ratio_of_medians, spread

REGRESSIONS = (
    *("missing", "failed", "loss worse", "equality worse", "fewer iterations", "no times"),
    "slower",
)
"""Words that make the exit code 1."""
UNDECIDED = ("other hardware", "too few iterations")
"""Words that say nothing of a point; where all do, the exit code is 2."""
_EQUALITY = ("equal", "close", "differs")
_VERDICTS = ("trains", "undecided", "", "diverged", "frozen", "skipped", "nan")
"""Words of a loss, from good to bad; no loss in the log is worse than one that trains."""


def read_measured(path: Path) -> list[Run]:
    """Return the runs of a sweep, a run folder or a log.

    Args:
        path: Which of them is found out by what lies there.

    Raises:
        LogError: nothing of that kind is there.
    """
    if (path / SWEEP_FILE).is_file():
        runs = read_sweep(path)
    else:
        runs = [run for log in find_logs(path) if (run := read_run(log)).log.recognised]
    if not runs:
        raise LogError(f"{path}: no sweep and no training log there")
    # Predictions are equal or not by construction: a gate on them would say nothing.
    others = sorted({run.source for run in runs} - {MEASURED})
    if others:
        raise LogError(f"{path}: holds {' and '.join(others)} figures; give measured ones")
    return runs


# Judging


@dataclass(frozen=True)
class Judged:
    """A point of both sides, judged."""

    label: str
    word: str
    """One of :data:`REGRESSIONS` or :data:`UNDECIDED`; else ``same``, ``faster``,
    ``perhaps slower``, ``new`` or ``no old times``."""
    detail: str = ""
    old: Spread | None = None
    new: Spread | None = None
    change: float | None = None
    """New median over old, minus 1: above 0 is slower."""
    change_low: float | None = None
    change_high: float | None = None
    interval_covers: str = ""
    """The variation that the interval covers; see :mod:`parse.stats`."""


def judge(old: Sequence[Run], new: Sequence[Run], args: argparse.Namespace) -> list[Judged]:
    """Judge every point of either side, in the order of the old one.

    Args:
        old: What is known.
        new: What is judged.
        args: ``tolerance``, ``phase``, ``warmup`` and ``any_hardware``.

    Raises:
        LogError: no point is on both sides, or the sides are of two studies.
    """
    label_runs([*old, *new])
    before, after = ({p.identity: p for p in group_points(side)} for side in (old, new))
    if not before.keys() & after.keys():
        raise LogError(
            f"no point is on both sides ({len(before)} and {len(after)} points); "
            "give two results of the same sweep"
        )
    equality = {
        id(item.ours.runs[0]): item.equality
        for side in (old, new)
        for item in compare_points(side, args.warmup)
    }
    found = []
    for identity, point in before.items():
        if ours := after.get(identity):
            words = [equality.get(id(side.runs[0]), "") for side in (point, ours)]
            found.append(_judge_point(point, ours, words, args))
        else:
            found.append(Judged(point.label, "missing", "not in the new results"))
    return found + [Judged(p.label, "new") for key, p in after.items() if key not in before]


def _judge_point(
    old: PointRuns, new: PointRuns, equality: Sequence[str], args: argparse.Namespace
) -> Judged:
    label = old.label
    failures = [
        ", ".join(dict.fromkeys(run.status for run in side.runs if not run.finished))
        for side in (old, new)
    ]
    if failures[1] and not failures[0]:
        return Judged(label, "failed", failures[1])
    verdicts = [
        max((run.loss.word for run in side.runs), key=_VERDICTS.index) for side in (old, new)
    ]
    if _VERDICTS.index(verdicts[1]) > _VERDICTS.index(verdicts[0]) and not failures[0]:
        words = [word or "no loss" for word in verdicts]
        return Judged(label, "loss worse", f"{words[0]} before, {words[1]} now")
    known = [_EQUALITY.index(word) for word in equality if word in _EQUALITY]
    if len(known) == 2 and known[1] > known[0]:
        detail = f"{equality[0]} before, {equality[1]} now, against the reference"
        return Judged(label, "equality worse", detail)
    # Iterations that are gone were not measured, so their times say nothing.
    counts = [
        min((len(run.log.iterations) for run in side.finished), default=0) for side in (old, new)
    ]
    if counts[1] < counts[0]:
        rejects = sum(len(run.log.rejects) for run in new.runs)
        rejected = f"; {rejects} lines rejected" if rejects else ""
        detail = f"{counts[0]} before, {counts[1]} now{rejected}"
        return Judged(label, "fewer iterations", detail)
    return _judge_times(old, new, args)


def _judge_times(old: PointRuns, new: PointRuns, args: argparse.Namespace) -> Judged:
    before, after = (side.times_ms(args.phase, args.warmup) for side in (old, new))
    judged = Judged(old.label, "", "", spread(before), spread(after))
    if judged.new is None and judged.old is not None:
        return replace(judged, word="no times", detail=f"no {args.phase} times in the new results")
    ratio = ratio_of_medians(after, before)
    if ratio is None:
        return replace(judged, word="no old times")
    judged = replace(judged, change=ratio.ratio - 1)
    if ratio.low is None or ratio.high is None:
        return replace(judged, word="too few iterations", detail="no interval")
    low, high = ratio.low - 1, ratio.high - 1
    if low > args.tolerance:
        word = "slower"
    elif ratio.ratio - 1 > args.tolerance:
        word = "perhaps slower"
    else:
        word = "faster" if high < 0 else "same"
    judged = replace(judged, change_low=low, change_high=high, interval_covers=ratio.covers)
    machines = [
        ", ".join(sorted({f"{run.log.device or ''} {run.hardware}".strip() for run in side.runs}))
        for side in (old, new)
    ]
    if machines[0] != machines[1] and not args.any_hardware:
        words = [machine or "unknown" for machine in machines]
        detail = f"{words[0]} before, {words[1]} now; --any-hardware judges them"
        return replace(judged, word="other hardware", detail=detail)
    return replace(judged, word=word)


def exit_code(judged: Sequence[Judged]) -> int:
    """Return 0 without a regression, 1 with one, 2 where nothing could be decided."""
    if any(point.word in REGRESSIONS for point in judged):
        return 1
    return 2 if all(point.word in (*UNDECIDED, "new", "no old times") for point in judged) else 0


# The command


def main(argv: Sequence[str]) -> int:
    """Compare two results; returns the exit code."""
    parser = Parser(
        "python -m parse compare",
        "Fail when NEW is slower than OLD, misses a point or iterations, or trains "
        "worse. Exit code: 0 no regression, 1 regression, 2 nothing to compare.",
    )
    for name in ("old", "new"):
        kinds = "sweep folder, run folder or log"
        parser.add_argument(name, type=Path, metavar=name.upper(), help=kinds)
    text = "share by which NEW may be slower (0.05 is 5%%)"
    parser.add_argument("--tolerance", type=number_from_0, default=0.05, help=text)
    parser.add_argument("--phase", default="iteration", help="iteration or a phase of the study")
    add_warmup(parser)
    text = "judge times of different machines as well"
    parser.add_argument("--any-hardware", action="store_true", help=text)
    args = parser.read(argv)
    old, new = (read_measured(path) for path in (args.old, args.new))
    judged = judge(old, new, args)
    phases = timed_phases(new[0].study)
    if args.phase not in phases:
        known = ", ".join(phases)
        parser.error(f"argument --phase: invalid choice: '{args.phase}' (choose from {known})")
    say("\n".join(_as_text(judged, args)))
    return exit_code(judged)


def _as_text(judged: Sequence[Judged], args: argparse.Namespace) -> list[str]:
    """A table for people, regressions marked."""
    head = ("", "point", "old ms", "new ms", "change", "95% interval", "")
    rows = [head, *(_text_row(point) for point in judged)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = [
        f"{args.phase}: medians after a warm-up of {args.warmup} (IQR; iterations x repeats), "
        f"tolerance {args.tolerance:.1%}",
        *("  ".join(t.ljust(w) for t, w in zip(row, widths, strict=True)).rstrip() for row in rows),
    ]
    if any(point.interval_covers == INSIDE_A_RUN for point in judged):
        lines.append("* one repeat: the interval covers variation inside a run, not between runs")
    bad = sum(point.word in REGRESSIONS for point in judged)
    return [*lines, f"{bad} regression{'' if bad == 1 else 's'} in {len(judged)} points"]


def _text_row(point: Judged) -> tuple[str, ...]:
    def times(side: Spread | None) -> str:
        if side is None:
            return "none"
        return f"{side.median_ms:.1f} ({side.iqr_ms:.1f}; {side.iterations} x {side.repeats})"

    change = "" if point.change is None else f"{point.change:+.1%}"
    interval = ""
    if point.change_low is not None and point.change_high is not None:
        star = "*" if point.interval_covers == INSIDE_A_RUN else ""
        interval = f"[{point.change_low:+.1%}, {point.change_high:+.1%}]{star}"
    text = f"{point.word}: {point.detail}" if point.detail else point.word
    mark = "!" if point.word in REGRESSIONS else ""
    untimed = point.old is None and point.new is None
    sides = ("", "") if untimed else (times(point.old), times(point.new))
    return tuple(printable(cell) for cell in (mark, point.label, *sides, change, interval, text))
