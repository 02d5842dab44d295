"""The report of a sweep: ``python -m parse.report SWEEP_DIR``, from the repository's root.

Exit code 0 when every plugin mode is equal to vanilla, 1 when one is not, 2 when there is no sweep.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import jinja2

from parse.arguments import warmup_count
from parse.errors import LogError
from parse.labels import label_runs
from parse.pairs import Pair, make_pairs
from parse.report_context import report_context
from parse.run_folder import SWEEP_FILE, Run, read_json, read_sweep_run, sweep_entries
from parse.table import replace_text, write_tables

_TEMPLATES = Path(__file__).resolve().parent / "templates"


def main(argv: list[str] | None = None) -> int:
    """Write tables and report of a sweep folder, and say a line for each plugin mode."""
    parser = argparse.ArgumentParser(prog="python -m parse.report", description="Report a sweep.")
    parser.add_argument("sweep_dir", type=Path, metavar="SWEEP_DIR")
    parser.add_argument(
        "--warmup", type=warmup_count, default=1, help="first iterations left out of means (1)"
    )
    args = parser.parse_args(argv)
    try:
        pairs = report(args.sweep_dir, args.warmup)
    except LogError as error:
        sys.stderr.write(f"parse.report: error: {error}\n")
        return 2
    for pair in pairs:
        sys.stdout.write(f"{_one_line(pair.line)}\n")
    return int(not all(pair.equal for pair in pairs))


def report(sweep_dir: Path, warmup: int) -> list[Pair]:
    """Write ``tables/*.csv`` and ``report.md`` into a sweep folder.

    Returns:
        Each plugin run with the vanilla run it was held against.

    Raises:
        LogError: the folder holds no sweep with a run in it, or cannot be written.
    """
    runs = _read_runs(sweep_dir)
    write_tables(runs, sweep_dir / "tables", warmup, base=sweep_dir)
    pairs = make_pairs(runs, warmup)
    index = read_json(sweep_dir / SWEEP_FILE)
    text = render(report_context(sweep_dir, index, runs, pairs, warmup))
    try:
        replace_text(sweep_dir / "report.md", text)
    except OSError as error:
        raise LogError(f"{sweep_dir / 'report.md'}: cannot be written: {error.strerror}") from None
    return pairs


def render(context: dict[str, Any]) -> str:
    """The report's Markdown; what logs say is escaped."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # the output is Markdown, not HTML; the filter `text` escapes for it
    )
    environment.filters["text"] = _escape
    environment.filters["ms"] = _milliseconds
    environment.filters["number"] = _number
    return environment.get_template("report.md.j2").render(context)


def _read_runs(sweep_dir: Path) -> list[Run]:
    if not (sweep_dir / SWEEP_FILE).is_file():
        raise LogError(f"{sweep_dir}: has no {SWEEP_FILE}; give the folder of a sweep")
    runs = [read_sweep_run(entry) for entry in sweep_entries(sweep_dir)]
    if not runs:
        raise LogError(f"{sweep_dir / SWEEP_FILE}: lists no runs, or cannot be read")
    label_runs(runs)
    return runs


def _one_line(text: object) -> str:
    return "".join(c if c.isprintable() else " " for c in str(text)).strip()


def _escape(text: object) -> str:
    """Plain text for Markdown, safe inside a table's cell."""
    line = _one_line("" if text is None else text)
    for character in "\\`*_[]|<>":
        line = line.replace(character, f"\\{character}")
    return line


def _milliseconds(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


if __name__ == "__main__":
    sys.exit(main())
