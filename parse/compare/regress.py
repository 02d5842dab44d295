"""The regression gate: ``python -m parse compare OLD NEW``, for CI.

Exit code 0 without a regression, 1 with one, 2 when the sides cannot be compared.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from configs.files import printable
from parse.arguments import add_warmup, number_from_0
from parse.compare.measured import Measured, by_key, matching_fields, read_measured
from parse.compare.references import is_reference_file, read_references
from parse.compare.stats import Spread, ratio_of_medians, spread
from parse.errors import LogError

REGRESSIONS = (
    *("missing", "failed", "loss worse", "equality worse", "fewer iterations", "no times"),
    *("slower", "too wide"),
)
"""Words that make the exit code 1."""
UNDECIDED = ("other hardware", "too few iterations")
"""Words that say nothing of a point; where all do, the exit code is 2."""
_EQUALITY = ("equal", "close", "differs")


@dataclass(frozen=True)
class Judged:
    """What became of a point."""

    label: str
    word: str
    """One of :data:`REGRESSIONS` or :data:`UNDECIDED`; else ``same``, ``faster``,
    ``perhaps slower``, ``new`` or ``no old times``."""
    detail: str = ""
    old: Spread | None = None
    new: Spread | None = None
    change: float | None = None
    """New median over old, minus 1: above 0 is slower."""
    low: float | None = None
    high: float | None = None
    covers: str = ""
    """What variation the interval covers; see :mod:`parse.compare.stats`."""


@dataclass(frozen=True)
class Gate:
    """How strict the gate is."""

    tolerance: float = 0.05
    phase: str = "iteration"
    any_hardware: bool = False
    strict: bool = False
    """Whether a point fails where its interval does not rule out that it is too slow."""


def main(argv: Sequence[str]) -> int:
    """Compare two sets of runs; returns the exit code."""
    args = _parser().parse_args(argv)
    try:
        new = read_measured(args.new, args.warmup)
        if is_reference_file(args.old):
            old = read_references(args.old, new)
        else:
            old = read_measured(args.old, args.warmup)
        phases = list(dict.fromkeys(name for point in (*old, *new) for name in point.times_ms))
        if args.phase not in ("iteration", *phases):
            known = ", ".join(phases)
            _parser().error(
                f"argument --phase: invalid choice: '{args.phase}' (choose from {known})"
            )
        gate = Gate(args.tolerance, args.phase, args.any_hardware, args.strict)
        judged = judge(old, new, gate)
    except LogError as error:
        sys.stderr.write(f"parse compare: error: {printable(str(error))}\n")
        return 2
    if args.json:
        sys.stdout.write(json.dumps(as_json(judged, args), indent=2, allow_nan=False) + "\n")
    else:
        sys.stdout.write("\n".join(as_text(judged, args)) + "\n")
    return exit_code(judged)


def judge(old: Sequence[Measured], new: Sequence[Measured], gate: Gate) -> list[Judged]:
    """Judge every point of either side, in the order of the old one.

    Raises:
        LogError: no point is on both sides.
    """
    names = matching_fields(old, new)
    before, after = by_key(old, names), by_key(new, names)
    if not before.keys() & after.keys():
        raise LogError(
            f"no point is on both sides ({len(before)} and {len(after)} points); "
            "give two results of the same sweep"
        )
    found = [_judge_point(point, after.get(key), gate) for key, point in before.items()]
    return found + [Judged(p.label, "new") for key, p in after.items() if key not in before]


def exit_code(judged: Sequence[Judged]) -> int:
    """0 without a regression, 1 with one, 2 where nothing could be decided."""
    if any(point.word in REGRESSIONS for point in judged):
        return 1
    return 2 if all(point.word in (*UNDECIDED, "new", "no old times") for point in judged) else 0


def as_json(judged: Sequence[Judged], args: argparse.Namespace) -> dict[str, Any]:
    """The whole comparison as one object; times in ms, changes as shares."""
    return {
        "phase": args.phase,
        "tolerance": args.tolerance,
        "warmup": args.warmup,
        "exit_code": exit_code(judged),
        "points": [_point_json(point) for point in judged],
    }


def _point_json(point: Judged) -> dict[str, Any]:
    names = {"low": "change_low", "high": "change_high", "covers": "interval_covers"}
    found = {names.get(name, name): value for name, value in asdict(point).items()}
    found["regression"] = point.word in REGRESSIONS
    for side, times in (("old", point.old), ("new", point.new)):
        if times:
            found[side] |= {"iqr_ms": times.iqr_ms}
    return found


def as_text(judged: Sequence[Judged], args: argparse.Namespace) -> list[str]:
    """A table for people, regressions marked."""
    head = ("", "point", "old ms", "new ms", "change", "95% interval", "")
    rows = [head, *(_text_row(point) for point in judged)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = [
        f"{args.phase}: medians after a warm-up of {args.warmup} (IQR; iterations x repeats), "
        f"tolerance {args.tolerance:.1%}",
        *("  ".join(t.ljust(w) for t, w in zip(row, widths, strict=True)).rstrip() for row in rows),
    ]
    if any(point.covers == "inside a run" for point in judged):
        lines.append("* one repeat: the interval covers variation inside a run, not between runs")
    bad = sum(point.word in REGRESSIONS for point in judged)
    return [*lines, f"{bad} regression{'' if bad == 1 else 's'} in {len(judged)} points"]


def _judge_point(old: Measured, new: Measured | None, gate: Gate) -> Judged:
    label = old.label
    if new is None:
        return Judged(label, "missing", "not in the new results")
    if new.failures and not old.failures:
        return Judged(label, "failed", ", ".join(dict.fromkeys(new.failures)))
    if new.verdict_rank > old.verdict_rank and not old.failures:
        return Judged(label, "loss worse", f"{_loss(old)} before, {_loss(new)} now")
    both = [_EQUALITY.index(p.equality) for p in (old, new) if p.equality in _EQUALITY]
    if len(both) == 2 and both[1] > both[0]:
        detail = f"{old.equality} before, {new.equality} now, against the reference"
        return Judged(label, "equality worse", detail)
    # Iterations that are gone were not measured, so their times say nothing.
    if old.iterations and min(new.iterations, default=0) < min(old.iterations):
        detail = f"{min(old.iterations)} before, {min(new.iterations, default=0)} now"
        rejected = f"; {new.rejects} lines rejected" if new.rejects else ""
        return Judged(label, "fewer iterations", detail + rejected)
    return _judge_times(old, new, gate)


def _judge_times(old: Measured, new: Measured, gate: Gate) -> Judged:
    before, after = old.times_ms.get(gate.phase, []), new.times_ms.get(gate.phase, [])
    spreads = spread(before), spread(after)
    if spreads[0] is None:
        return Judged(old.label, "no old times", "", *spreads)
    if spreads[1] is None:
        return Judged(old.label, "no times", f"no {gate.phase} times in the new results", *spreads)
    ratio = ratio_of_medians(after, before)
    if ratio is None:
        return Judged(old.label, "no old times", "a median of 0", *spreads)
    change = ratio.ratio - 1
    if ratio.low is None or ratio.high is None:
        word = "too wide" if gate.strict else "too few iterations"
        return Judged(old.label, word, "no interval", *spreads, change)
    low, high = ratio.low - 1, ratio.high - 1
    word, detail = _word(change, low, high, gate), ""
    if word == "too wide":
        detail = f"may be {high:+.1%}, the tolerance is {gate.tolerance:.1%}"
    if set(old.hardware) != set(new.hardware) and not gate.any_hardware:
        word = "other hardware"
        detail = f"{_hardware(old)} before, {_hardware(new)} now; --any-hardware judges them"
    return Judged(old.label, word, detail, *spreads, change, low, high, ratio.covers)


def _word(change: float, low: float, high: float, gate: Gate) -> str:
    tolerance = gate.tolerance
    if low > tolerance:
        return "slower"
    if gate.strict and high > tolerance:
        return "too wide"
    if change > tolerance:
        return "perhaps slower"
    return "faster" if high < 0 else "same"


def _loss(point: Measured) -> str:
    return point.verdict or "no loss"


def _hardware(point: Measured) -> str:
    return ", ".join(point.hardware) or "unknown"


def _text_row(point: Judged) -> tuple[str, ...]:
    def times(side: Spread | None) -> str:
        if side is None:
            return "none"
        return f"{side.median_ms:.1f} ({side.iqr_ms:.1f}; {side.iterations} x {side.repeats})"

    change = "" if point.change is None else f"{point.change:+.1%}"
    interval = ""
    if point.low is not None and point.high is not None:
        star = "*" if point.covers == "inside a run" else ""
        interval = f"[{point.low:+.1%}, {point.high:+.1%}]{star}"
    text = f"{point.word}: {point.detail}" if point.detail else point.word
    mark = "!" if point.word in REGRESSIONS else ""
    untimed = point.old is None and point.new is None
    sides = ("", "") if untimed else (times(point.old), times(point.new))
    return tuple(printable(cell) for cell in (mark, point.label, *sides, change, interval, text))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m parse compare",
        description="Fail when NEW is slower than OLD, misses a point or iterations, or trains "
        "worse. Exit code: 0 no regression, 1 regression, 2 nothing to compare.",
    )
    what = "folder of tables, sweep folder, run folder or log"
    parser.add_argument(
        "old", type=Path, metavar="OLD", help=f"{what}, or values kept by 'python -m parse keep'"
    )
    parser.add_argument("new", type=Path, metavar="NEW", help=what)
    parser.add_argument(
        "--tolerance",
        type=number_from_0,
        default=0.05,
        help="share by which NEW may be slower (0.05 is 5%%)",
    )
    parser.add_argument("--phase", default="iteration", help="iteration or a phase of the study")
    add_warmup(parser, "first iterations left out (1); tables have their own")
    parser.add_argument(
        "--any-hardware", action="store_true", help="judge times of different machines as well"
    )
    parser.add_argument(
        "--strict", action="store_true",
        help="fail where an interval reaches beyond the tolerance, or there is none",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser
