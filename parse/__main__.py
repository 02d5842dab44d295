"""Logs to tables: ``python -m parse LOG_OR_DIR... --out DIR``, from the repository's root."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from parse.arguments import warmup_count
from parse.errors import LogError
from parse.labels import label_runs
from parse.run_folder import Run, find_logs, read_run
from parse.table import write_tables


def main(argv: list[str] | None = None) -> int:
    """Parse logs and write both tables; returns the exit code, 2 when nothing could be read."""
    args = _parser().parse_args(argv)
    try:
        runs = _read(args.paths)
        written = write_tables(runs, args.out, args.warmup)
    except LogError as error:
        sys.stderr.write(f"parse: error: {error}\n")
        return 2
    iterations = sum(len(run.log.iterations) for run in runs)
    rejects = sum(len(run.log.rejects) for run in runs)
    sys.stdout.write(
        f"{len(runs)} runs, {iterations} iterations, {rejects} lines rejected: "
        f"{', '.join(str(path) for path in written)}\n"
    )
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m parse", description="Logs to tables.")
    parser.add_argument("paths", nargs="+", type=Path, metavar="LOG_OR_DIR")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument(
        "--warmup", type=warmup_count, default=1, help="first iterations left out of means (1)"
    )
    return parser


def _read(paths: list[Path]) -> list[Run]:
    runs, seen = [], set()
    for given in paths:
        for path in find_logs(given):
            if path.resolve() in seen:
                continue
            seen.add(path.resolve())
            run = read_run(path)
            if run.log.recognised or run.run_json:
                runs.append(run)
            else:
                sys.stderr.write(f"parse: {path}: not a training log; left out\n")
    if not runs:
        raise LogError(f"{', '.join(str(path) for path in paths)}: no training log found")
    label_runs(runs)
    return runs


if __name__ == "__main__":
    sys.exit(main())
