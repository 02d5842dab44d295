"""The regression gate: ``python -m parse compare OLD NEW``, for CI, and what it compares with.

``python -m parse keep RESULTS FILE.json`` keeps the points of a result as what their machine is
known to do; ``python -m parse compare FILE.json NEW`` holds new results against those of their own
machine. One file is of one sweep, on as many machines as it was kept from.

Exit code 0 without a regression, 1 with one, 2 when the sides cannot be compared.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from configs.cli import Parser, add_json, add_warmup, number_from_0, say
from configs.files import printable, write_text
from parse.compare import compare_points, timed_phases
from parse.records import LogError
from parse.run import (
    MEASURED,
    SWEEP_FILE,
    Run,
    find_logs,
    free_by_gate,
    group_points,
    label_runs,
    read_run,
    read_sweep,
)
from parse.stats import INSIDE_A_RUN, Spread, ratio_of_medians, spread
from parse.verdict import FAILED

REGRESSIONS = (
    *("missing", "failed", "loss worse", "equality worse", "fewer iterations", "no times"),
    *("slower", "too wide"),
)
"""Words that make the exit code 1."""
UNDECIDED = ("other hardware", "too few iterations")
"""Words that say nothing of a point; where all do, the exit code is 2."""
_EQUALITY = ("equal", "close", "differs")
_VERDICTS = ("trains", "undecided", "", "diverged", "frozen", "skipped", "nan")
"""Words of a loss, from good to bad; no loss in the log is worse than one that trains."""
_NOT_IDENTITY = ("name", "data_prefix", "iterations", "device", "split", "accumulation")
"""Fields of a point that do not say which point it is."""
_KEY = "reference_values"
"""A file of reference values has it."""
_RESULTS = "sweep folder, run folder or log"


@dataclass
class Measured:
    """What was measured of one point of one side."""

    fields: dict[str, str]
    """Which point it is: settings as text, numbers in one spelling."""
    label: str
    times_ms: dict[str, list[list[float]]] = field(default_factory=dict)
    """By phase: one list a repeat, after the warm-up."""
    verdict: str = "trains"
    """Worst of all repeats; see :class:`parse.verdict.LossVerdict`."""
    failures: list[str] = field(default_factory=list)
    """Statuses of repeats that are not ``ok``."""
    equality: str = ""
    """Against the reference engine; empty where it was not compared."""
    hardware: list[str] = field(default_factory=list)
    """Machines of the repeats, each once; empty where it is not recorded."""
    iterations: list[int] = field(default_factory=list)
    """Complete iterations in the log of each repeat that finished."""
    rejects: int = 0
    """Lines of all logs that were left out."""

    def join(self, other: Measured) -> None:
        """Take in repeats of the same point."""
        for phase, times in other.times_ms.items():
            self.times_ms.setdefault(phase, []).extend(times)
        self.verdict = max(self.verdict, other.verdict, key=_VERDICTS.index)
        self.failures += other.failures
        self.equality = self.equality or other.equality
        self.iterations += other.iterations
        self.rejects += other.rejects
        self.hardware += [name for name in other.hardware if name not in self.hardware]


def read_measured(path: Path, warmup: int) -> list[Measured]:
    """Return the points of a sweep, a run folder or a log, one a run.

    Args:
        path: Which of them is found out by what lies there.
        warmup: First iterations to leave out.

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
    label_runs(runs)
    # The first of a point's repeats says whether they are equal.
    equality = {id(c.ours.runs[0]): c.equality for c in compare_points(runs, warmup)}
    return [
        _measured(run, group.label, warmup, equality.get(id(run), ""))
        for group in group_points(runs)
        for run in group.runs
    ]


def _measured(run: Run, label: str, warmup: int, equality: str) -> Measured:
    machine = " ".join(filter(None, (run.log.device, run.hardware)))
    times = {phase: run.times_ms(phase, warmup) for phase in timed_phases(run.study)}
    return Measured(
        _identity(run),
        label,
        {phase: [own] for phase, own in times.items() if own and run.finished},
        run.loss.word,
        [] if run.finished else [run.status],
        equality,
        [machine] if machine else [],
        [len(run.log.iterations)] if run.finished else [],
        len(run.log.rejects),
    )


def _identity(run: Run) -> dict[str, str]:
    """The run's fields as text, with those filled in that can only have one meaning."""
    study = run.study
    found = {name: _spelling(v) for name, v in run.fields.items() if v not in (None, "")}
    engine = study.engines.get(found.get("engine", ""))
    for name, row in study.fields.items():
        not_taken = row.only_some_engines and engine is not None and name not in engine.fields
        one_meaning = row.only_some_engines or row.in_pairs == "same"
        if not_taken or (one_meaning and name not in found):
            found[name] = _spelling(row.default)
    left_out = (*_NOT_IDENTITY, *free_by_gate(study))
    return {name: text for name, text in found.items() if name not in left_out}


def _spelling(value: Any) -> str:  # noqa: ANN401 - a number or a text
    try:
        return f"{float(value):.12g}"
    except ValueError:
        return str(value)


# Judging


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
    """What variation the interval covers; see :mod:`parse.stats`."""


@dataclass(frozen=True)
class Gate:
    """How strict the gate is."""

    tolerance: float = 0.05
    phase: str = "iteration"
    any_hardware: bool = False
    strict: bool = False
    """Whether a point fails where its interval does not rule out that it is too slow."""


def judge(old: Sequence[Measured], new: Sequence[Measured], gate: Gate) -> list[Judged]:
    """Judge every point of either side, in the order of the old one.

    Raises:
        LogError: no point is on both sides.
    """
    # What one side says nothing of cannot tell points apart.
    known = [{n for point in side for n, v in point.fields.items() if v} for side in (old, new)]
    names = sorted(known[0] & known[1])
    before, after = _by_fields(old, names), _by_fields(new, names)
    if not before.keys() & after.keys():
        raise LogError(
            f"no point is on both sides ({len(before)} and {len(after)} points); "
            "give two results of the same sweep"
        )
    found = [_judge_point(point, after.get(key), gate) for key, point in before.items()]
    return found + [Judged(p.label, "new") for key, p in after.items() if key not in before]


def _by_fields(points: Iterable[Measured], names: Sequence[str]) -> dict[tuple[str, ...], Measured]:
    found: dict[tuple[str, ...], Measured] = {}
    for point in points:
        key = tuple(point.fields.get(name, "") for name in names)
        if key in found:
            found[key].join(point)
        else:
            found[key] = point
    return found


def _judge_point(old: Measured, new: Measured | None, gate: Gate) -> Judged:
    label = old.label
    if new is None:
        return Judged(label, "missing", "not in the new results")
    if new.failures and not old.failures:
        return Judged(label, "failed", ", ".join(dict.fromkeys(new.failures)))
    ranks = [_VERDICTS.index(point.verdict) for point in (old, new)]
    if ranks[1] > ranks[0] and not old.failures:
        words = [point.verdict or "no loss" for point in (old, new)]
        return Judged(label, "loss worse", f"{words[0]} before, {words[1]} now")
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
    low, high, detail = ratio.low - 1, ratio.high - 1, ""
    if low > gate.tolerance:
        word = "slower"
    elif gate.strict and high > gate.tolerance:
        word, detail = "too wide", f"may be {high:+.1%}, the tolerance is {gate.tolerance:.1%}"
    elif change > gate.tolerance:
        word = "perhaps slower"
    else:
        word = "faster" if high < 0 else "same"
    if set(old.hardware) != set(new.hardware) and not gate.any_hardware:
        machines = [", ".join(point.hardware) or "unknown" for point in (old, new)]
        word = "other hardware"
        detail = f"{machines[0]} before, {machines[1]} now; --any-hardware judges them"
    return Judged(old.label, word, detail, *spreads, change, low, high, ratio.covers)


def exit_code(judged: Sequence[Judged]) -> int:
    """Return 0 without a regression, 1 with one, 2 where nothing could be decided."""
    if any(point.word in REGRESSIONS for point in judged):
        return 1
    return 2 if all(point.word in (*UNDECIDED, "new", "no old times") for point in judged) else 0


# The commands


def main(argv: Sequence[str]) -> int:
    """Compare two sets of runs; returns the exit code."""
    parser = Parser(
        "python -m parse compare",
        "Fail when NEW is slower than OLD, misses a point or iterations, or trains "
        "worse. Exit code: 0 no regression, 1 regression, 2 nothing to compare.",
    )
    parser.add_argument(
        "old", type=Path, metavar="OLD",
        help=f"{_RESULTS}, or values kept by 'python -m parse keep'",
    )  # fmt: skip
    parser.add_argument("new", type=Path, metavar="NEW", help=_RESULTS)
    parser.add_argument(
        "--tolerance", type=number_from_0, default=0.05,
        help="share by which NEW may be slower (0.05 is 5%%)",
    )  # fmt: skip
    parser.add_argument("--phase", default="iteration", help="iteration or a phase of the study")
    add_warmup(parser)
    parser.add_argument(
        "--any-hardware", action="store_true", help="judge times of different machines as well"
    )
    parser.add_argument(
        "--strict", action="store_true",
        help="fail where an interval reaches beyond the tolerance, or there is none",
    )  # fmt: skip
    add_json(parser)
    args = parser.read(argv)
    new = read_measured(args.new, args.warmup)
    is_kept = args.old.suffix == ".json" and not args.old.is_dir()
    old = _kept_of(args.old, new) if is_kept else read_measured(args.old, args.warmup)
    phases = {"iteration": 0} | {name: 0 for point in (*old, *new) for name in point.times_ms}
    if args.phase not in phases:
        known = ", ".join(phases)
        parser.error(f"argument --phase: invalid choice: '{args.phase}' (choose from {known})")
    gate = Gate(args.tolerance, args.phase, args.any_hardware, args.strict)
    judged = judge(old, new, gate)
    if args.json:
        say(json.dumps(_as_json(judged, args), indent=2, allow_nan=False))
    else:
        say("\n".join(_as_text(judged, args)))
    return exit_code(judged)


def _as_json(judged: Sequence[Judged], args: argparse.Namespace) -> dict[str, Any]:
    """The whole comparison as one object; times in ms, changes as shares."""
    names = {"low": "change_low", "high": "change_high", "covers": "interval_covers"}
    points = []
    for point in judged:
        row = {names.get(name, name): value for name, value in asdict(point).items()}
        row["regression"] = point.word in REGRESSIONS
        for side, times in (("old", point.old), ("new", point.new)):
            if times:
                row[side] |= {"iqr_ms": times.iqr_ms}
        points.append(row)
    about = {name: getattr(args, name) for name in ("phase", "tolerance", "warmup")}
    return {**about, "exit_code": exit_code(judged), "points": points}


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
    if any(point.covers == INSIDE_A_RUN for point in judged):
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
    if point.low is not None and point.high is not None:
        star = "*" if point.covers == INSIDE_A_RUN else ""
        interval = f"[{point.low:+.1%}, {point.high:+.1%}]{star}"
    text = f"{point.word}: {point.detail}" if point.detail else point.word
    mark = "!" if point.word in REGRESSIONS else ""
    untimed = point.old is None and point.new is None
    sides = ("", "") if untimed else (times(point.old), times(point.new))
    return tuple(printable(cell) for cell in (mark, point.label, *sides, change, interval, text))


def keep(argv: Sequence[str]) -> int:
    """Keep the points of a result as reference values; returns the exit code."""
    parser = Parser(
        "python -m parse keep",
        "Keep the points of RESULTS as what this machine is known to do. "
        "'python -m parse compare FILE NEW' holds new results against them.",
    )
    parser.add_argument("results", type=Path, metavar="RESULTS", help=_RESULTS)
    parser.add_argument("file", type=Path, metavar="FILE", help="JSON; other machines' values stay")
    add_warmup(parser)
    parser.add_argument(
        "--replace", action="store_true", help="put the new values in place of those kept before"
    )
    args = parser.read(argv)
    points = read_measured(args.results, args.warmup)
    for point in points:
        # What failed or has no times is nothing to hold others against.
        words = [*point.failures, *([point.verdict] if point.verdict in FAILED else [])]
        if words or not point.times_ms:
            why = ", ".join(words) or "no times"
            raise LogError(f"{args.results}: {point.label}: {why}; keep results that are sound")
    kept = _read_kept(args.file) if args.file.exists() else []
    new = {_of_machine(point) for point in points}
    replaced = [point for point in kept if _of_machine(point) in new]
    if replaced and not args.replace:
        raise LogError(
            f"{args.file}: has values of {replaced[0].label} on this machine already; "
            "give --replace to keep the new ones in their place"
        )
    kept = [point for point in kept if _of_machine(point) not in new] + points
    args.file.parent.mkdir(parents=True, exist_ok=True)
    write_text(args.file, _FILE.dump_json({_KEY: kept}, indent=1).decode() + "\n")
    say(f"{len(points)} points kept in {args.file}, {len(replaced)} replaced")
    return 0


_FILE = TypeAdapter(dict[str, list[Measured]])


def _kept_of(path: Path, new: Sequence[Measured]) -> list[Measured]:
    """The points kept from the machines of new results."""
    machines = [point.hardware for point in new]
    kept = [point for point in _read_kept(path) if point.hardware in machines]
    if not kept:
        names = dict.fromkeys(", ".join(hardware) or "an unknown machine" for hardware in machines)
        raise LogError(
            f"{path}: has no values of {' or '.join(names)}; "
            f"keep them with python -m parse keep RESULTS {path}"
        )
    return kept


def _read_kept(path: Path) -> list[Measured]:
    if not path.is_file():
        raise LogError(f"{path}: no such file")
    try:
        return _FILE.validate_json(path.read_bytes())[_KEY]
    except (ValidationError, KeyError):
        why = "holds no reference values, or damaged ones; make it with python -m parse keep"
        raise LogError(f"{path}: {why}") from None


def _of_machine(point: Measured) -> str:
    return json.dumps([point.hardware, sorted(point.fields.items())])
