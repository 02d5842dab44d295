"""``python -m parse diagnose LOG...``: what ails runs, and what to do about it.

Exit code 0: nothing found; 1: illnesses; 2: a log that cannot be read, or has nothing known in it.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from configs.files import printable
from parse.diagnose.illness import Illness
from parse.diagnose.log import Diagnosis, diagnose
from parse.errors import LogError
from parse.run_folder import find_logs


def main(argv: list[str]) -> int:
    """Diagnose logs.

    Returns:
        The exit code.
    """
    arguments = _parser().parse_args(argv)
    found, complaints = [], []
    for given in arguments.logs:
        try:
            # A folder is searched; whatever else is given is read as a log.
            paths = find_logs(given) if given.is_dir() else [given]
            found += [_known(diagnose(path)) for path in paths]
        except LogError as error:
            complaints.append(printable(str(error)))
    sys.stdout.write(_as_json(found) if arguments.json else "\n".join(map(_as_text, found)))
    sys.stderr.write("".join(f"parse diagnose: error: {text}\n" for text in complaints))
    return 2 if complaints else int(any(one.illnesses for one in found))


def _known(found: Diagnosis) -> Diagnosis:
    if not found.is_known:
        reason = "is empty" if not found.num_lines else "nothing in it is known here"
        raise LogError(f"{found.path}: {reason}: not a training log?")
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m parse diagnose", description=__doc__)
    parser.add_argument("logs", nargs="+", type=Path, metavar="LOG", help="a log, or a folder")
    parser.add_argument("--json", action="store_true", help="write JSON")
    return parser


def _row(illness: Illness) -> dict[str, Any]:
    return {
        "name": illness.name,
        "line": illness.line,
        "evidence": illness.evidence,
        "remedy": illness.remedy,
    }


def _as_json(found: list[Diagnosis]) -> str:
    logs = [
        {
            "log": str(one.path),
            "lines": one.num_lines,
            "steps": one.num_steps,
            "software": one.software,
            "illnesses": [_row(illness) for illness in one.illnesses],
            "not_judged": one.not_judged,
        }
        for one in found
    ]
    every = [{"log": str(d.path), **_row(illness)} for d in found for illness in d.illnesses]
    return json.dumps({"illnesses": every, "logs": logs}, indent=2) + "\n"


def _as_text(one: Diagnosis) -> str:
    of = f" of {', '.join(one.software)}" if one.software else ""
    lines = [f"{printable(str(one.path))}: {one.num_lines} lines{of}, {one.num_steps} steps"]
    for illness in one.illnesses:
        lines.append(f"  {illness.name}, line {illness.line}: {illness.evidence}")
        lines.append(f"    {illness.remedy}")
    if not one.illnesses:
        lines.append("  no illness found")
    lines += [f"  not judged: {note}" for note in one.not_judged]
    return "\n".join(lines) + "\n"
