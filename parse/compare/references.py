"""Reference values: what a machine is known to do, kept in a file and compared against.

``python -m parse keep RESULTS FILE.json`` keeps the points of a result; ``python -m parse compare
FILE.json NEW`` holds new results against those of their own machine. One file is of one sweep, on
as many machines as it was kept from.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from configs.files import printable
from parse.arguments import add_warmup
from parse.compare.measured import Measured, read_measured
from parse.compare.verdict import FAILED
from parse.errors import LogError
from parse.write import replace_text

_KEY = "reference_values"
"""A file of ours has it."""
_FILE = TypeAdapter(dict[str, list[Measured]])


def is_reference_file(path: Path) -> bool:
    """Whether a path is meant as a file of reference values."""
    return path.suffix == ".json" and not path.is_dir()


def read_references(path: Path, new: Sequence[Measured]) -> list[Measured]:
    """The points kept from the machines of new results.

    Raises:
        LogError: the file cannot be read, or holds nothing of these machines.
    """
    machines = [point.hardware for point in new]
    kept = [point for point in _read(path) if point.hardware in machines]
    if not kept:
        names = dict.fromkeys(", ".join(hardware) or "an unknown machine" for hardware in machines)
        raise LogError(
            f"{path}: has no values of {' or '.join(names)}; "
            f"keep them with python -m parse keep RESULTS {path}"
        )
    return kept


def main(argv: Sequence[str]) -> int:
    """Keep the points of a result as reference values; returns the exit code."""
    args = _parser().parse_args(argv)
    try:
        points = read_measured(args.results, args.warmup)
        _refuse_bad(args.results, points)
        kept = _read(args.file) if args.file.exists() else []
        new = {_identity(point) for point in points}
        replaced = [point for point in kept if _identity(point) in new]
        if replaced and not args.replace:
            raise LogError(
                f"{args.file}: has values of {replaced[0].label} on this machine already; "
                "give --replace to keep the new ones in their place"
            )
        kept = [point for point in kept if _identity(point) not in new] + points
        args.file.parent.mkdir(parents=True, exist_ok=True)
        replace_text(args.file, _FILE.dump_json({_KEY: kept}, indent=1).decode() + "\n")
    except LogError as error:
        sys.stderr.write(f"parse keep: error: {printable(str(error))}\n")
        return 2
    except OSError as error:
        sys.stderr.write(f"parse keep: error: {args.file}: cannot be written: {error.strerror}\n")
        return 2
    sys.stdout.write(f"{len(points)} points kept in {args.file}, {len(replaced)} replaced\n")
    return 0


def _identity(point: Measured) -> str:
    return json.dumps([point.hardware, sorted(point.fields.items())])


def _refuse_bad(path: Path, points: Sequence[Measured]) -> None:
    """What failed or has no times is nothing to hold others against."""
    for point in points:
        words = [*point.failures, *([point.verdict] if point.verdict in FAILED else [])]
        if words or not point.times_ms:
            why = ", ".join(words) or "no times"
            raise LogError(f"{path}: {point.label}: {why}; keep results that are sound")


def _read(path: Path) -> list[Measured]:
    if not path.is_file():
        raise LogError(f"{path}: no such file")
    try:
        return _FILE.validate_json(path.read_bytes())[_KEY]
    except (ValidationError, KeyError):
        why = "holds no reference values, or damaged ones; make it with python -m parse keep"
        raise LogError(f"{path}: {why}") from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m parse keep",
        description="Keep the points of RESULTS as what this machine is known to do. "
        "'python -m parse compare FILE NEW' holds new results against them.",
    )
    what = "folder of tables, sweep folder, run folder or log"
    parser.add_argument("results", type=Path, metavar="RESULTS", help=what)
    parser.add_argument("file", type=Path, metavar="FILE", help="JSON; other machines' values stay")
    add_warmup(parser)
    parser.add_argument(
        "--replace", action="store_true", help="put the new values in place of those kept before"
    )
    return parser
