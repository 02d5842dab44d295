"""Logs to tables: ``python -m parse LOG_OR_DIR... --out DIR``, from the repository's root.

``python -m parse compare OLD NEW`` is the regression gate and ``python -m parse keep RESULTS FILE``
keeps what it may compare with, see :mod:`parse.regress`; ``python -m parse diagnose LOG...`` says
what ails a run, see :mod:`parse.diagnose`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from parse.arguments import add_warmup
from parse.records import LogError


def main(argv: list[str] | None = None) -> int:
    """Parse logs and write the tables.

    Returns:
        The exit code: 1 where the loss of a run failed, 2 where nothing could be read.
    """
    given = sys.argv[1:] if argv is None else argv
    if given[:1] == ["diagnose"]:
        from parse import diagnose

        return diagnose.main(given[1:])
    if given[:1] in (["compare"], ["keep"]):
        from parse import regress

        return (regress.main if given[0] == "compare" else regress.keep)(given[1:])
    parser = argparse.ArgumentParser(
        prog="python -m parse",
        description="Logs to tables.",
        epilog="'python -m parse compare OLD NEW' looks for regressions, "
        "'python -m parse keep RESULTS FILE' keeps values to compare with, "
        "'python -m parse diagnose LOG...' says what ails a run.",
    )
    parser.add_argument("paths", nargs="+", type=Path, metavar="LOG_OR_DIR")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    add_warmup(parser)
    parser.add_argument(
        "--show-rejects", action="store_true", help="print every line that was left out, and why"
    )
    args = parser.parse_args(given)
    try:
        return _parse(args)
    except LogError as error:
        _complain(f"error: {error}")
        return 2


def _parse(args: argparse.Namespace) -> int:
    from parse.compare import compare_points, write_comparisons
    from parse.render import one_line
    from parse.run import MEASURED, find_logs, label_runs, read_run
    from parse.tables import write_tables
    from parse.two_runs import log_notes, reject_lines

    runs = []
    found = {path.resolve(): path for given in args.paths for path in find_logs(given)}
    for path in found.values():
        run = read_run(path)
        if run.log.recognised or run.run_json:
            runs.append(run)
        else:
            _complain(f"{path}: not a training log; left out")
    if not runs:
        raise LogError(f"{', '.join(map(str, args.paths))}: no training log found")
    study = label_runs(runs)
    written = write_tables(runs, args.out, args.warmup)
    written.append(write_comparisons(compare_points(runs, args.warmup), study, args.out))
    for run in runs:
        log, count = run.log, len(run.log.iterations)
        if args.show_rejects:
            sys.stdout.write("".join(f"{line}\n" for line in reject_lines(log)))
        notes = log_notes(log) if log.rejects else []
        if run.source == MEASURED and not count:
            notes.append("no iteration in it")
        elif run.source == MEASURED and args.warmup >= count:
            notes.append(f"all {count} iterations are warm-up (--warmup {args.warmup})")
        if run.loss.failed:
            notes.append(f"the loss is {run.loss.text}")
        for note in notes:
            _complain(f"{log.path}: {note}")
    iterations = sum(len(run.log.iterations) for run in runs)
    rejects = sum(len(run.log.rejects) for run in runs)
    sys.stdout.write(
        f"{len(runs)} runs, {iterations} iterations, {rejects} lines rejected: "
        f"{', '.join(one_line(path) for path in written)}\n"
    )
    return int(any(run.loss.failed for run in runs))


def _complain(text: str) -> None:
    """Write a line on standard error; no path in it steers the terminal."""
    sys.stderr.write(f"parse: {''.join(c if c.isprintable() else ' ' for c in text)}\n")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.stderr.write("parse: interrupted\n")
        sys.exit(130)
