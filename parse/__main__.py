"""Logs to tables: ``python -m parse LOG_OR_DIR... --out DIR``, from the repository's root.

``--report`` also keeps, of one sweep folder, what ``python -m parse.report --from-tables`` shows.
``python -m parse compare OLD NEW`` is the regression gate, see :mod:`parse.compare.regress`;
``python -m parse keep RESULTS FILE`` keeps what it may compare with;
``python -m parse diagnose LOG...`` says what ails a run, see :mod:`parse.diagnose`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from parse.arguments import add_warmup
from parse.compare import references, regress
from parse.compare.comparisons import compare_points, write_comparisons
from parse.compare.present import log_notes, reject_lines
from parse.diagnose import command as diagnose
from parse.errors import LogError
from parse.labels import label_runs
from parse.monitor import is_monitor_csv
from parse.report.findings import parse_sweep
from parse.report.render import one_line
from parse.run_folder import Run, attach_samples, find_logs, read_run
from parse.table import write_tables
from parse.unmeasured import MEASURED


def main(argv: list[str] | None = None) -> int:
    """Parse logs and write the tables.

    Returns:
        The exit code: 1 where the loss of a run failed, 2 where nothing could be read.
    """
    given = sys.argv[1:] if argv is None else argv
    if given[:1] == ["compare"]:
        return regress.main(given[1:])
    if given[:1] == ["keep"]:
        return references.main(given[1:])
    if given[:1] == ["diagnose"]:
        return diagnose.main(given[1:])
    args = _parser().parse_args(given)
    try:
        runs, written = _parse(args)
    except LogError as error:
        _complain(f"error: {error}")
        return 2
    if args.show_rejects:
        sys.stdout.write("".join(f"{line}\n" for run in runs for line in reject_lines(run.log)))
    for run in runs:
        notes = log_notes(run.log) if run.log.rejects else []
        for note in filter(None, [*notes, _nothing_timed(run, args.warmup)]):
            _complain(f"{run.log.path}: {note}")
        if run.loss.failed:
            _complain(f"{run.log.path}: the loss is {run.loss.text}")
    iterations = sum(len(run.log.iterations) for run in runs)
    rejects = sum(len(run.log.rejects) for run in runs)
    sys.stdout.write(
        f"{len(runs)} runs, {iterations} iterations, {rejects} lines rejected: "
        f"{', '.join(one_line(path) for path in written)}\n"
    )
    return int(any(run.loss.failed for run in runs))


def _parse(args: argparse.Namespace) -> tuple[list[Run], list[Path]]:
    if args.report and len(args.paths) != 1:
        raise LogError("--report is of one sweep: give its folder alone")
    if args.report:
        return parse_sweep(args.paths[0], args.out, args.warmup)
    runs = _read(args.paths)
    study = label_runs(runs)
    written = write_tables(runs, args.out, args.warmup)
    comparisons = compare_points(runs, args.warmup)
    return runs, [*written, write_comparisons(comparisons, study, args.out)]


def _nothing_timed(run: Run, warmup: int) -> str:
    """Why a measured run has no mean times; empty when it has."""
    count = len(run.log.iterations)
    if run.source != MEASURED:
        return ""
    if not count:
        return "no iteration in it"
    skipped = run.warmup(warmup)
    return "" if skipped < count else f"all {count} iterations are warm-up (--warmup {skipped})"


def _parser() -> argparse.ArgumentParser:
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
        "--report", action="store_true", help="keep what the report of one sweep folder says, too"
    )
    parser.add_argument(
        "--show-rejects", action="store_true", help="print every line that was left out, and why"
    )
    return parser


def _read(paths: list[Path]) -> list[Run]:
    runs, seen = [], set()
    samples = [path for path in paths if is_monitor_csv(path)]
    for given in (path for path in paths if path not in samples):
        for path in find_logs(given):
            if path.resolve() in seen:
                continue
            seen.add(path.resolve())
            run = read_run(path)
            if run.log.recognised or run.run_json:
                runs.append(run)
            else:
                _complain(f"{path}: not a training log; left out")
    if not runs:
        raise LogError(f"{', '.join(str(path) for path in paths)}: no training log found")
    for path in attach_samples(runs, samples):
        _complain(f"{path}: samples of which of the {len(runs)} runs? left out")
    return runs


def _complain(text: str) -> None:
    """A line on standard error; no path in it steers the terminal."""
    sys.stderr.write(f"parse: {one_line(text)}\n")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.stderr.write("parse: interrupted\n")
        sys.exit(130)
