"""The regression gate: ``python -m parse compare OLD NEW``, for CI.

Exit code 0 without a regression, 1 with one, 2 when the sides cannot be compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from configs.cli import Parser, add_warmup, number_from_0, say
from configs.files import printable
from parse.compare import compare_points
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
from parse.stats import INSIDE_A_RUN, Ratio, Spread, ratio_of_medians, spread

REGRESSIONS = (
    *("missing", "failed", "loss worse", "equality worse", "fewer iterations", "no times"),
    "slower",
)
"""Words that make the exit code 1."""
UNDECIDED = ("other hardware", "too few iterations", "new", "no old times")
"""Words that say nothing of a point; where all do, the exit code is 2."""
_EQUALITY = ("equal", "close", "differs")
_LOSSES = ("trains", "undecided", "", "diverged", "frozen", "skipped", "nan")
"""Words of a loss, from good to bad; no loss in the log is worse than one that trains."""
_HEAD = ("", "point", "old ms", "new ms", "change", "95% interval", "")


def read_measured(path: Path) -> list[Run]:
    """Return the runs of a sweep, a run folder or a log, whichever lies at ``path``.

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


class Judged(NamedTuple):
    """A point of both sides, judged."""

    label: str
    word: str
    """One of :data:`REGRESSIONS` or :data:`UNDECIDED`; else ``same``, ``faster`` or
    ``perhaps slower``."""
    detail: str = ""
    old: Spread | None = None
    new: Spread | None = None
    ratio: Ratio | None = None
    """New median over old: above 1 is slower."""


def judge(
    old: Sequence[Run], new: Sequence[Run], tolerance: float = 0.05, warmup: int = 1
) -> list[Judged]:
    """Judge every point of either side, in the order of the old one.

    Args:
        old: What is known.
        new: What is judged.
        tolerance: Share by which the new side may be slower.
        warmup: First iterations left out of times.

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
        for item in compare_points(side, warmup)
    }
    found = []
    for identity, point in before.items():
        if ours := after.get(identity):
            words = [equality.get(id(side.runs[0]), "") for side in (point, ours)]
            worse = _worse(point, ours, words)
            found.append(
                Judged(point.label, *worse)
                if worse
                else _judge_times(point, ours, tolerance, warmup)
            )
        else:
            found.append(Judged(point.label, "missing", "not in the new results"))
    return found + [Judged(p.label, "new") for key, p in after.items() if key not in before]


def _worse(old: PointRuns, new: PointRuns, equality: Sequence[str]) -> tuple[str, str] | None:
    """Return the word and the details of a regression that is not one of times."""
    sides = (old, new)
    failures = [
        ", ".join(dict.fromkeys(run.status for run in side.runs if not run.finished))
        for side in sides
    ]
    if failures[1] and not failures[0]:
        return "failed", failures[1]
    losses = [max((run.loss.word for run in side.runs), key=_LOSSES.index) for side in sides]
    if _is_worse(losses, _LOSSES) and not failures[0]:
        return "loss worse", "{} before, {} now".format(*(word or "no loss" for word in losses))
    if _is_worse(equality, _EQUALITY):
        return "equality worse", "{} before, {} now, against the reference".format(*equality)
    # Iterations that are gone were not measured, so their times say nothing.
    counts = [min((len(run.log.iterations) for run in s.finished), default=0) for s in sides]
    if counts[1] < counts[0]:
        rejects = sum(len(run.log.rejects) for run in new.runs)
        rejected = f"; {rejects} lines rejected" if rejects else ""
        return "fewer iterations", f"{counts[0]} before, {counts[1]} now{rejected}"
    return None


def _is_worse(words: Sequence[str], order: Sequence[str]) -> bool:
    return {*words} <= {*order} and order.index(words[1]) > order.index(words[0])


def _judge_times(old: PointRuns, new: PointRuns, tolerance: float, warmup: int) -> Judged:
    before, after = (side.times_ms("iteration", warmup) for side in (old, new))
    ratio, detail = ratio_of_medians(after, before), ""
    machines = [
        ", ".join(sorted({f"{run.log.device or ''} {run.hardware}".strip() for run in side.runs}))
        for side in (old, new)
    ]
    if ratio is None:
        word = "no times" if spread(before) and not spread(after) else "no old times"
    elif ratio.low is None or ratio.high is None:
        word, detail = "too few iterations", "no interval"
    elif machines[0] != machines[1]:
        word = "other hardware"
        detail = "{} before, {} now".format(*(name or "unknown" for name in machines))
    elif ratio.ratio - 1 > tolerance:
        word = "slower" if ratio.low - 1 > tolerance else "perhaps slower"
    else:
        word = "faster" if ratio.high < 1 else "same"
    return Judged(old.label, word, detail, spread(before), spread(after), ratio)


def exit_code(judged: Sequence[Judged]) -> int:
    """Return 0 without a regression, 1 with one, 2 where nothing could be decided."""
    if any(point.word in REGRESSIONS for point in judged):
        return 1
    return 2 if all(point.word in UNDECIDED for point in judged) else 0


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
    add_warmup(parser)
    args = parser.read(argv)
    judged = judge(read_measured(args.old), read_measured(args.new), args.tolerance, args.warmup)
    say(
        f"iteration: medians after a warm-up of {args.warmup} (IQR; iterations x repeats), "
        f"tolerance {args.tolerance:.1%}"
    )
    rows = [_HEAD, *map(_cells, judged)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        say("  ".join(t.ljust(w) for t, w in zip(row, widths, strict=True)).rstrip())
    if any(point.ratio and point.ratio.covers == INSIDE_A_RUN for point in judged):
        say("* one repeat: the interval covers variation inside a run, not between runs")
    bad = sum(point.word in REGRESSIONS for point in judged)
    say(f"{bad} regression{'' if bad == 1 else 's'} in {len(judged)} points")
    return exit_code(judged)


def _cells(point: Judged) -> tuple[str, ...]:
    """Return a row of the table for people, regressions marked."""
    times = [
        f"{s.median_ms:.1f} ({s.iqr_ms:.1f}; {s.iterations} x {s.repeats})" if s else "none"
        for s in (point.old, point.new)
        if point.old or point.new
    ]
    change, interval = "", ""
    if ratio := point.ratio:
        change = f"{ratio.ratio - 1:+.1%}"
        if ratio.low is not None and ratio.high is not None:
            star = "*" if ratio.covers == INSIDE_A_RUN else ""
            interval = f"[{ratio.low - 1:+.1%}, {ratio.high - 1:+.1%}]{star}"
    text = f"{point.word}: {point.detail}" if point.detail else point.word
    mark = "!" if point.word in REGRESSIONS else ""
    cells = (mark, point.label, *(times or ("", "")), change, interval, text)
    return tuple(map(printable, cells))
