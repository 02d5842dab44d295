"""``python -m benchmarks.compat``: run the plugin and the trainers with every supported version.

A cell that was run with the code as it is now, and in which nothing differed, is not run again; so
a call that was stopped goes on. Without options every cell is run whose Python is on PATH.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from benchmarks.compat import documents
from benchmarks.compat.cells import EQUALITY, Cell, all_cells, run_cell, stored
from benchmarks.compat.environments import OWN_PYTHON, find_interpreter
from deep_optimizer_states.deepspeed_guard import CHECKED_VERSIONS


def _chosen(cells: Sequence[Cell], given: argparse.Namespace) -> list[Cell]:
    """Cells of which the command line speaks; of both kinds where it names neither release."""
    if given.deepspeed and not given.megatron_core:
        cells = [cell for cell in cells if cell.kind == EQUALITY]
    if given.megatron_core and not given.deepspeed:
        cells = [cell for cell in cells if cell.kind != EQUALITY]
    wanted = {"deepspeed": given.deepspeed, "python": given.python, "megatron": given.megatron_core}
    return [
        cell
        for cell in cells
        if all(getattr(cell, name) in ("", *texts) for name, texts in wanted.items() if texts)
    ]


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main(argv: Sequence[str] | None = None) -> int:
    """Run cells; returns 1 if something failed or differed, 2 where no cell is meant.

    Stopped by the keyboard it returns 130.
    """
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compat",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for name in ("deepspeed", "python", "megatron-core"):
        parser.add_argument(f"--{name}", action="append", default=[], metavar="VERSION")
    parser.add_argument("--again", action="store_true", help="also cells that are done")
    given = parser.parse_args(argv)
    cells = all_cells(CHECKED_VERSIONS)
    chosen = _chosen(cells, given)
    if not chosen:
        said = "; ".join(cell.name for cell in cells)
        sys.stderr.write(f"no cell has these versions; there are: {said}\n")
        return 2
    try:
        return int(_run(cells, chosen, given))
    except KeyboardInterrupt:
        _say("stopped; the same command goes on")
        return 130
    finally:
        documents.write(cells, CHECKED_VERSIONS)


def _run(cells: Sequence[Cell], chosen: Sequence[Cell], given: argparse.Namespace) -> bool:
    """Run cells, all of which ``cells`` are; returns whether something failed or differed."""
    failed = False
    for cell in chosen:
        done = stored([cell]).get(cell)
        if done and done.is_ok and not given.again:
            _say(f"{cell.name}: done before, {documents.as_text(done)}")
            continue
        if cell.python != OWN_PYTHON and not find_interpreter(cell.python):
            _say(f"{cell.name}: left out, no python{cell.python} on PATH that runs")
            failed |= cell.python in given.python
            continue
        _say(f"{cell.name} ...")
        result = run_cell(cell)
        failed |= not result.is_ok
        _say(f"{cell.name}: {documents.as_text(result)}, {result.seconds:.0f} s {result.reason}")
        documents.write(cells, CHECKED_VERSIONS)
    return failed


if __name__ == "__main__":
    sys.exit(main())
