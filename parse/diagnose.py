"""Finds what ails a run, from its log alone: ``python -m parse diagnose LOG...``.

One pass over a log collects what it says (:mod:`parse.observed`). Then the figures and settings are
judged (:mod:`parse.conditions`), the loss scaler's words (:mod:`parse.overflows`) and what ended
the run (:mod:`parse.failures`). Signs and remedies are rows of ``illnesses.toml``.

Exit code 0: nothing found; 1: illnesses; 2: a log that cannot be read, or has nothing known in it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.cli import Parser, add_json, complain, say
from configs.files import json_lines, printable
from parse import conditions
from parse.illnesses import Illness
from parse.log import METRICS_FILE
from parse.log_name import is_overlapped
from parse.observed import Fact, Observed
from parse.records import LogError
from parse.run import find_logs
from parse.trainer import JsonLines


@dataclass
class Diagnosis:
    """All that was found in a log."""

    path: Path
    num_lines: int
    num_steps: int
    software: list[str]
    illnesses: list[Illness]
    """What makes the run worth nothing first, then in the order of the log."""
    not_judged: list[str]
    """Questions that the log leaves open."""
    states: set[str]
    """Settings and programs that it names; remedies depend on them."""


def diagnose(path: Path) -> Diagnosis:
    """Read a log once, and keep no line of it.

    Raises:
        LogError: it cannot be read, or is no text.
    """
    seen, lines = Observed(), JsonLines(path)
    seen.read(lines)
    if is_overlapped(path.name):
        seen.facts.setdefault("overlapped", Fact("", 0, ""))
    found = [
        *seen.overflows.illnesses(),
        *conditions.illnesses(seen),
        *seen.failures.illnesses(seen.progress),
    ]
    found.sort(key=lambda illness: (illness.kind.tier, illness.line))
    found = _of_one_cause(found, seen)
    # Two conditions may find one illness; the line that shows it first counts.
    kept = list({illness.name: illness for illness in reversed(found)}.values())[::-1]
    steps, software = seen.num_steps, sorted(seen.software)
    not_judged = [*lines.notes, *conditions.not_judged(seen)]
    beside = path.with_name(METRICS_FILE)
    if not seen.norms and any(event.get("grad_norm") is not None for event in json_lines(beside)):
        not_judged.append(f"the norms in {beside}: name that file to have them judged")
    states = {*seen.facts, *seen.software}
    return Diagnosis(path, seen.num_lines, steps, software, kept, not_judged, states)


def main(argv: Sequence[str]) -> int:
    """Diagnose logs; returns the exit code."""
    parser = Parser("python -m parse diagnose", _ABOUT)
    parser.add_argument("logs", nargs="+", type=Path, metavar="LOG", help="a log, or a folder")
    add_json(parser)
    arguments = parser.read(argv)
    found: list[Diagnosis] = []
    complaints: list[str] = []
    for given in arguments.logs:
        try:
            # A folder is searched; whatever else is given is read as a log.
            found += _in_folder(given, complaints) if given.is_dir() else [_known(diagnose(given))]
        except LogError as error:
            complaints.append(str(error))
    if arguments.json:
        sys.stdout.write(_as_json(found))
    elif found:
        say("\n\n".join(map(_as_text, found)))
    for text in complaints:
        complain(f"parse diagnose: error: {text}")
    return 2 if complaints else int(any(one.illnesses for one in found))


def _of_one_cause(found: list[Illness], seen: Observed) -> list[Illness]:
    """Name once what is not finite, by what shows it first."""
    lines = {one.name: one.line for one in reversed(found)}
    if lines.keys() & _OF_NORMS:
        # What is left of the loss without updates says nothing of those that were made.
        found = [one for one in found if one.name != "loss-unstable"]
    # An update that overflows has no norm.
    if (norm := lines.get("norm-nan")) and "overflow-every-step" not in lines:
        # A step whose loss is lost may tell of its gradients before it prints the loss.
        loss = lines.get("loss-nan")
        is_first = not loss or any(norm <= one.line < loss for one in seen.losses)
        kept = "norm-nan" if is_first else "loss-nan"
    else:
        kept = "loss-nan" if "loss-nan" in lines else "eval-loss-nan"
    return [one for one in found if one.name == kept or one.name not in _NOT_FINITE]


_OF_NORMS = {"norm-nan", "overflow-every-step"}
_NOT_FINITE = {"loss-nan", "norm-nan", "eval-loss-nan"}
_ABOUT = """``python -m parse diagnose LOG...``: what ails runs, and what to do about it.

Exit code 0: nothing found; 1: illnesses; 2: a log that cannot be read, or has nothing known in it.
"""


class _UnknownError(LogError):
    """A file has nothing of a training log in it."""


def _in_folder(folder: Path, complaints: list[str]) -> list[Diagnosis]:
    """Diagnose every log of a folder; what is none is left out, what cannot be read a complaint.

    Raises:
        LogError: there is none.
    """
    found, unread = [], []
    for path in find_logs(folder):
        try:
            found.append(_known(diagnose(path)))
        except _UnknownError as error:
            complain(f"parse diagnose: {error}; left out")
        except LogError as error:
            unread.append(str(error))
    complaints += unread
    if not found and not unread:
        raise LogError(f"{folder}: no training log in it")
    return found


def _known(found: Diagnosis) -> Diagnosis:
    if not (found.software or found.num_steps or found.illnesses):
        reason = "is empty" if not found.num_lines else "nothing in it is known here"
        raise _UnknownError(f"{found.path}: {reason}: not a training log?")
    return found


def _as_json(found: list[Diagnosis]) -> str:
    logs: list[dict[str, Any]] = []
    for one in found:
        rows = [
            {**illness._asdict(), "remedy": illness.remedy(one.states)} for illness in one.illnesses
        ]
        about = {"log": str(one.path), "lines": one.num_lines, "steps": one.num_steps}
        more = {"software": one.software, "illnesses": rows, "not_judged": one.not_judged}
        logs.append(about | more)
    every = [{"log": log["log"], **row} for log in logs for row in log["illnesses"]]
    return json.dumps({"illnesses": every, "logs": logs}, indent=2) + "\n"


def _as_text(one: Diagnosis) -> str:
    of = f" of {', '.join(one.software)}" if one.software else ""
    lines = [f"{printable(str(one.path))}: {one.num_lines} lines{of}, {one.num_steps} steps"]
    for illness in one.illnesses:
        lines.append(f"  {illness.name}, line {illness.line}: {illness.evidence}")
        lines.append(f"    {illness.remedy(one.states)}")
    if not one.illnesses:
        lines.append("  no illness found")
    lines += [f"  not judged: {note}" for note in one.not_judged]
    return "\n".join(lines)
