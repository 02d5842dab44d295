#!/usr/bin/env python3
"""Compare two training logs: times of each phase, a verdict on each loss, then the speed-up.

Standard library alone; runs from any folder. Exit code 2 when a log cannot be used.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from configs.cli import Parser, add_json, add_warmup, number_from_0, run_command, say
from parse.log import read_usable_log
from parse.records import PHASES, Log, LogError
from parse.verdict import DEFAULT_TOLERANCE, compare

KEYS = ("vanilla", "deep_optimizer_states")
"""Names of the two sides in the JSON."""


def main() -> int:
    """Read both logs and print the comparison; returns the exit code."""
    args = _parser().read()
    logs = (
        read_usable_log(args.vanilla_deepspeed),
        read_usable_log(args.deep_optimizer_states),
    )
    _refuse_mixed_up(*logs)
    result = compare(*logs, args.warmup, args.tolerance, KEYS)
    if not result["verdict"]["pair"]:
        paths = " and ".join(str(log.path) for log in logs)
        raise LogError(f"{paths}: they have no iteration in common")
    if args.json:
        say(json.dumps(result, indent=2, allow_nan=False))
    else:
        say("\n".join(_as_text(logs, result)))
    return 0


def _parser() -> Parser:
    parser = Parser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--vanilla-deepspeed", type=Path, required=True, metavar="A.log")
    parser.add_argument("--deep-optimizer-states", type=Path, required=True, metavar="B.log")
    add_warmup(parser, "first iterations not timed [default 1]")
    close = f"largest difference of two losses for 'close' ({DEFAULT_TOLERANCE:g})"
    parser.add_argument("--tolerance", type=number_from_0, default=DEFAULT_TOLERANCE, help=close)
    add_json(parser)
    return parser


def _refuse_mixed_up(vanilla: Log, ours: Log) -> None:
    """Refuse a log that is given twice, and logs whose own names say that they are swapped."""
    if vanilla.path.samefile(ours.path):
        raise LogError(f"{ours.path}: is given twice; give a log of each engine")
    engines = [log.settings.get("engine") for log in (vanilla, ours)]
    if engines[1] == "stock" and engines[0] not in (None, "stock"):
        raise LogError(
            f"{vanilla.path}: its name says {engines[0]}, and that of {ours.path} says "
            f"{engines[1]}: they are swapped; exchange the two"
        )


def _as_text(logs: tuple[Log, Log], result: dict[str, Any]) -> list[str]:
    details = result["verdict_detail"]
    lines = [
        *_interval_times("Vanilla Deepspeed", logs[0]),
        *_interval_times("Deep Optimizer States", logs[1]),
        "",
        f"Median (mean) in ms without the first {result['warmup']}, and vanilla / ours:",
        f"  {'':<10}{'vanilla':>26}{'ours':>26}{'ratio':>16}",
        *(_phase_line(result, phase) for phase in ("iteration", *PHASES)),
        "",
        f"Loss, vanilla: {details[KEYS[0]]['text']}",
        f"Loss, ours:    {details[KEYS[1]]['text']}",
        f"Pair: {details['pair']['text']}",
        f"Judged on {details['pair']['judged_on']}",
        *(f"note: {note}" for note in result["notes"]),
    ]
    if result["speedup"] is None:
        return [*lines, f"speed-up withheld: {result['speedup_withheld']}"]
    return [*lines, f"speed-up: {result['speedup']:.3f}x (tolerance {result['tolerance']:g})"]


def _interval_times(title: str, log: Log) -> list[str]:
    shown = (
        "missing" if r.iteration_s is None else f"{r.iteration_s:.2f} seconds"
        for r in log.iterations
    )
    numbers = (f"Iteration {record.iteration}: " for record in log.iterations)
    return [f"Interval times from {title}:", *map(str.__add__, numbers, shown)]


def _phase_line(result: dict[str, Any], phase: str) -> str:
    def both(median: float | None, mean: float | None, digits: int) -> str:
        return "missing" if median is None else f"{median:.{digits}f} ({mean:.{digits}f})"

    cells = []
    for key in KEYS:
        median = result["median_ms"][key][phase]
        count = "" if median is None else f" n={result['timed_iterations'][key][phase]}"
        cells.append(both(median, result["mean_ms"][key][phase], 1) + count)
    ratio = both(result["ratio_of_medians"][phase], result["ratio"][phase], 3)
    return f"  {phase:<10}{cells[0]:>26}{cells[1]:>26}{ratio:>16}"


if __name__ == "__main__":
    raise SystemExit(run_command(main, name="quick-parse-results"))
