"""Logs to tables: ``python -m parse LOG_OR_DIR... --out DIR``, from the repository's root.

``python -m parse diagnose LOG...`` says what ails a run, see :mod:`parse.diagnose`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

from configs.cli import Parser, add_warmup, complain, run_command, say
from parse.records import LogError

if TYPE_CHECKING:
    from parse.run import Run


def main(argv: Sequence[str] | None = None) -> int:
    """Parse logs and write the tables.

    Returns:
        The exit code: 1 where the loss of a run failed.

    Raises:
        LogError: nothing could be read.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    if given[:1] == ["diagnose"]:
        from parse import diagnose

        return diagnose.main(given[1:])
    if _is_near_diagnose(given[0] if given else ""):
        raise LogError(f"'{given[0]}': no such file or folder: did you mean 'diagnose'?")
    parser = Parser(
        "python -m parse",
        "Logs to tables.",
        epilog="'python -m parse diagnose LOG...' says what ails a run.",
    )
    parser.add_argument("paths", nargs="+", type=Path, metavar="LOG_OR_DIR")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    add_warmup(parser)
    return _parse(parser.read(given))


def _is_near_diagnose(word: str) -> bool:
    """Return whether a word is no path that exists, and nearly the command's name."""
    return bool(get_close_matches(word, ["diagnose"], cutoff=0.75)) and not Path(word).exists()


def _parse(args: argparse.Namespace) -> int:
    from parse.compare import compare_points, write_comparisons
    from parse.run import copies, find_logs, label_runs, read_run
    from parse.tables import write_tables

    runs = []
    found = {path.resolve(): path for given in args.paths for path in find_logs(given)}
    for path in found.values():
        run = read_run(path)
        if run.log.recognised or run.run_json:
            runs.append(run)
        else:
            complain(f"parse: {path}: not a training log; left out")
    if not runs:
        raise LogError(
            f"{', '.join(map(str, args.paths))}: no training log found that has the times of "
            "iterations (DeepSpeed's, Megatron's, a trainer's JSON); of any other log, "
            "`python -m parse diagnose` reads the losses"
        )
    study = label_runs(runs)
    for copy, first in copies(runs):
        complain(f"parse: {copy.log.path}: says the same as {first.log.path}; read once")
        runs = [run for run in runs if run is not copy]
    written = write_tables(runs, args.out, args.warmup)
    written.append(write_comparisons(compare_points(runs, args.warmup), study, args.out))
    for run in runs:
        for note in _notes(run, args.warmup):
            complain(f"parse: {run.log.path}: {note}")
    iterations = sum(len(run.log.iterations) for run in runs)
    rejects = sum(len(run.log.rejects) for run in runs)
    say(
        f"{len(runs)} runs, {iterations} iterations, {rejects} lines rejected: "
        f"{', '.join(map(str, written))}"
    )
    return int(any(run.loss.failed for run in runs))


def _notes(run: Run, warmup: int) -> Iterator[str]:
    from configs.sources import MEASURED
    from parse.run import INCOMPLETE
    from parse.verdict import log_notes

    count = len(run.log.iterations)
    if run.log.rejects:
        yield from log_notes(run.log)
    else:
        yield from run.log.notes_on_name
    if run.source == MEASURED and not count:
        yield "no iteration in it"
    elif run.source == MEASURED and warmup >= count:
        yield f"all {count} iterations are warm-up (--warmup {warmup})"
    if run.status == INCOMPLETE:
        yield run.cut_short
    if run.loss.failed:
        yield f"the loss is {run.loss.text}"


if __name__ == "__main__":
    raise SystemExit(run_command(main, name="parse"))
