"""``python -m benchmarks.memory``: measure peaks of memory and print them beside predicted ones.

measure FILE   every case that FILE has no result of, each in a process of its own; goes on
               where it was stopped
table [FILE]   predicted beside measured, as docs/memory.md shows it
pairs          advice for known models and machines, beside DeepSpeed's estimators
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.memory.cases import load_cases
from benchmarks.memory.measure import ALLOCATOR, measure
from benchmarks.memory.pairs import pairs_table
from benchmarks.memory.table import MEASURED, as_markdown, rows_of, summary


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns 1 if a case could not be measured."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.memory",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=("measure", "table", "pairs"))
    parser.add_argument("file", type=Path, nargs="?", default=MEASURED)
    text = "measure with the C library's allocator as it is by itself"
    parser.add_argument("--own-allocator", action="store_true", help=text)
    given = parser.parse_args(argv)
    if given.command == "measure":
        cases = load_cases()
        allocator = {} if given.own_allocator else ALLOCATOR
        return int(bool(measure([*cases["fitted"], *cases["judged"]], given.file, allocator)))
    if given.command == "table":
        parts = []
        for name in ("judged", "fitted"):
            rows = rows_of(name, given.file, with_others=True)
            parts += [f"## {name}: {len(rows)} cases", summary(rows), as_markdown(rows)]
        text = "\n\n".join(parts)
    else:
        text = pairs_table()
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
    os._exit(0)  # DeepSpeed's threads would hold the process


if __name__ == "__main__":
    sys.exit(main())
