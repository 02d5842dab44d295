"""Compares the tables of two folders cell by cell.

``python tests/support/same_cells.py BEFORE AFTER [--ignore COLUMN...]`` prints what differs, table
by table, and ends with exit code 1 if anything does. Every ``*.csv`` below the folders is read;
numbers must be equal as numbers (``1`` and ``1.0`` are), all other cells as text. Rows are compared
by position, columns by name.
"""

import argparse
import csv
import sys
from decimal import Decimal, InvalidOperation
from itertools import zip_longest
from pathlib import Path

SHOWN = 20
"""Differences that are printed of each table."""


def differences(before, after, ignore=()):
    """Lines that say what differs between the tables below two folders; none where all is equal."""
    names = [{path.relative_to(folder) for path in folder.rglob("*.csv")} for folder in
             (before, after)]  # fmt: skip
    if not names[0]:
        return [f"{before}: no *.csv below it"]
    lines = []
    for name in sorted(names[0] | names[1]):
        if name not in names[0] or name not in names[1]:
            lines.append(f"{name}: only in {before if name in names[0] else after}")
            continue
        found = list(_in_table(_read(before / name), _read(after / name), set(ignore)))
        lines += [f"{name}: {line}" for line in found[:SHOWN]]
        if found[SHOWN:]:
            lines.append(f"{name}: and {len(found) - SHOWN} more differences")
    return lines


def _read(path):
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        rows = list(reader)
        return list(reader.fieldnames or ()), rows


def _in_table(before, after, ignore):
    columns = [name for name in before[0] if name not in ignore]
    new = [name for name in after[0] if name not in ignore]
    for name in columns:
        if name not in new:
            yield f"column {name!r} is gone"
    for name in new:
        if name not in columns:
            yield f"column {name!r} is new"
    if len(before[1]) != len(after[1]):
        yield f"{len(before[1])} rows before, {len(after[1])} after"
    for number, (old, now) in enumerate(zip_longest(before[1], after[1]), 1):
        for name in columns if old and now else ():
            if name in now and not _same(old[name], now[name]):
                yield f"row {number}, {name}: {old[name]!r} before, {now[name]!r} after"


def _same(one, other):
    if one == other:
        return True
    try:
        return Decimal(one) == Decimal(other)
    except (TypeError, InvalidOperation):
        return False


def main(argv=None):
    """Print the differences; returns the exit code: 0 where there are none."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--ignore", nargs="+", default=[], metavar="COLUMN")
    args = parser.parse_args(argv)
    for folder in (args.before, args.after):
        if not folder.is_dir():
            parser.error(f"{folder}: no such folder")
    lines = differences(args.before, args.after, args.ignore)
    tables = len(list(args.before.rglob("*.csv")))
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.write(f"{len(lines)} differences\n" if lines else f"{tables} tables, all equal\n")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
