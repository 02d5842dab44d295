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
from parse.compare.comparisons import compare_points, write_comparisons
from parse.compare.pairs import Pair
from parse.errors import LogError
from parse.labels import label_runs
from parse.report.context import report_context
from parse.report.html import TEMPLATES, one_line, render_html
from parse.report.simulated import simulated_context
from parse.run_folder import SWEEP_FILE, Run, read_json, read_sweep_run, sweep_entries
from parse.table import write_tables
from parse.unmeasured import MEASURED
from parse.write import replace_text


def main(argv: list[str] | None = None) -> int:
    """Write tables and report of a sweep folder, and say a line for each plugin mode."""
    parser = argparse.ArgumentParser(prog="python -m parse.report", description="Report a sweep.")
    parser.add_argument("sweep_dir", type=Path, metavar="SWEEP_DIR")
    parser.add_argument(
        "--warmup", type=warmup_count, default=1, help="first iterations left out of times (1)"
    )
    args = parser.parse_args(argv)
    try:
        pairs = report(args.sweep_dir, args.warmup)
    except LogError as error:
        sys.stderr.write(f"parse.report: error: {error}\n")
        return 2
    for pair in pairs:
        sys.stdout.write(f"{one_line(pair.line)}\n")
    return int(not all(pair.equal for pair in pairs))


def report(sweep_dir: Path, warmup: int) -> list[Pair]:
    """Write ``tables/``, ``report.md`` and ``report.html`` into a sweep folder.

    Returns:
        Each plugin run with the vanilla run it was held against, in the order of the runs; none
        where nothing was measured.

    Raises:
        LogError: the folder holds no sweep with a run in it, or cannot be written.
    """
    index = read_json(sweep_dir / SWEEP_FILE)
    runs = _read_runs(sweep_dir)
    write_tables(runs, sweep_dir / "tables", warmup, base=sweep_dir)
    comparisons = compare_points(runs, warmup)
    write_comparisons(comparisons, sweep_dir / "tables")
    measured = all(run.source == MEASURED for run in runs)
    try:
        if measured:
            context = report_context(sweep_dir, index, runs, comparisons, warmup)
        else:
            context = simulated_context(sweep_dir, index, runs, comparisons)
    except OSError as error:
        raise LogError(f"{error.filename}: cannot be read: {error.strerror}") from None
    template = "report" if measured else "simulated"
    for name, render in (("report.md", render_markdown), ("report.html", render_html)):
        try:
            replace_text(sweep_dir / name, render(context, template))
        except OSError as error:
            raise LogError(f"{sweep_dir / name}: cannot be written: {error.strerror}") from None
    if not measured:
        return []
    position = {id(run): number for number, run in enumerate(runs)}
    pairs = [pair for item in comparisons for pair in item.pairs]
    return sorted(pairs, key=lambda pair: position[id(pair.run)])


def render_markdown(context: dict[str, Any], template: str = "report") -> str:
    """The report for a repository; what logs say is escaped."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # the output is Markdown, not HTML; the filter `text` escapes for it
    )
    environment.filters["text"] = _escape
    environment.filters["code"] = lambda text: one_line(f".{text}")[1:]
    return environment.get_template(f"{template}.md.j2").render(context).rstrip("\n") + "\n"


def _read_runs(sweep_dir: Path) -> list[Run]:
    if not (sweep_dir / SWEEP_FILE).is_file():
        raise LogError(f"{sweep_dir}: has no {SWEEP_FILE}; give the folder of a sweep")
    entries = sweep_entries(sweep_dir)
    runs = [read_sweep_run(entry) for entry in entries]
    if not runs:
        raise LogError(f"{sweep_dir / SWEEP_FILE}: lists no runs, or cannot be read")
    for entry, run in zip(entries, runs, strict=True):
        # Of a run whose launcher is gone only the index knows that it is not running any more.
        if run.status in ("", "running") and entry.status:
            run.status_json["status"] = entry.status
    label_runs(runs)
    return runs


def _escape(text: object) -> str:
    """Plain text for Markdown, safe inside a table's cell."""
    line = one_line("" if text is None else text)
    # A reader of Markdown decodes entities, so that "&lt;" would come out as "<".
    for character in "\\`*_[]|<>&":
        line = line.replace(character, f"\\{character}")
    return line


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.stderr.write("parse.report: interrupted\n")
        sys.exit(130)
