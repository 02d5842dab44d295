"""The report of a sweep: ``python -m parse.report SWEEP_DIR``, from the repository's root.

``--index`` also lists all sweeps of its results folder in their ``index.html``; given the results
folder itself, it writes nothing else. ``--from-tables`` takes what
``python -m parse SWEEP_DIR --out SWEEP_DIR/tables --report`` found, without reading a log again.
Exit code 0 when every engine is held to be valid against the reference engine (equal to it, for a
bitwise gate), 1 when one is not, 2 when there is no sweep.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from parse.arguments import add_warmup
from parse.errors import LogError
from parse.report.figures import find_figures
from parse.report.findings import parse_sweep, read_findings
from parse.report.index import results_folder, write_index
from parse.report.render import one_line, render_html, render_markdown
from parse.run_folder import SWEEP_FILE
from parse.write import replace_text

_TABLES = ("runs", "iterations", "comparisons", "memory", "monitor")


def main(argv: list[str] | None = None) -> int:
    """Write the report of a sweep folder, and say a line for each verdict."""
    parser = argparse.ArgumentParser(prog="python -m parse.report", description="Report a sweep.")
    parser.add_argument("sweep_dir", type=Path, metavar="SWEEP_DIR")
    add_warmup(parser)
    parser.add_argument(
        "--from-tables",
        action="store_true",
        help="take what python -m parse --report found in SWEEP_DIR/tables; read no log",
    )
    parser.add_argument(
        "--index",
        action="store_true",
        help="also write index.html of the results folder, or of the folder given",
    )
    args = parser.parse_args(argv)
    tables = args.sweep_dir / "tables"
    try:
        if args.index and not (args.sweep_dir / SWEEP_FILE).exists():
            sys.stdout.write(f"{write_index(args.sweep_dir)}\n")
            return 0
        if not args.from_tables:
            parse_sweep(args.sweep_dir, tables, args.warmup)
        findings = read_findings(tables)
        write_report(args.sweep_dir, findings)
    except LogError as error:
        sys.stderr.write(f"parse.report: error: {one_line(error)}\n")
        return 2
    for line in findings["lines"]:
        sys.stdout.write(f"{one_line(line)}\n")
    if args.index:
        try:
            write_index(results_folder(args.sweep_dir))
        except LogError as error:  # The report itself is there.
            sys.stderr.write(f"parse.report: no index: {one_line(error)}\n")
    return int(not findings["all_hold"])


def write_report(sweep_dir: Path, findings: dict[str, Any]) -> None:
    """Write ``report.md`` and ``report.html`` of what was found, with the figures that are drawn.

    Raises:
        LogError: a figure cannot be read, or the folder cannot be written.
    """
    context, wanted = findings["context"], findings["wanted"]
    try:
        figures = find_figures(
            sweep_dir / "figures", wanted, findings["titles"], on_cpu=bool(context.get("on_cpu"))
        )
    except OSError as error:
        raise LogError(f"{error.filename}: cannot be read: {error.strerror}") from None
    context |= {
        "name": findings["name"],
        "description": findings["description"],
        "figures": figures,
        "not_drawn": sorted(set(wanted) - {entry["figure"] for entry in figures}, key=wanted.index),
        "tables": [name for name in _TABLES if (sweep_dir / "tables" / f"{name}.csv").is_file()],
    }
    for name, render in (("report.md", render_markdown), ("report.html", render_html)):
        try:
            replace_text(sweep_dir / name, render(context, findings["template"]))
        except OSError as error:
            raise LogError(f"{sweep_dir / name}: cannot be written: {error.strerror}") from None


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.stderr.write("parse.report: interrupted\n")
        sys.exit(130)
