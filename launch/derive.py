"""What is made of a sweep's runs: tables, figures and the report."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from configs.files import ROOT
from launch import cli


def derive(folder: Path, expected_figures: Sequence[str]) -> int:
    """Make tables, figures and the report of a sweep folder.

    Args:
        folder: ``RESULTS/SWEEP``.
        expected_figures: what the sweep is to show; other figures are drawn where they can be.

    Returns:
        0, or the exit code of the first step that failed; the report's is not 0 when two engines'
        results are not equal.
    """
    tables = str(folder / "tables")
    plots = ["plots", tables, "--out", str(folder / "figures")]
    # Logs are read once; figures and report are made of what was found in them.
    steps = (
        ("tables", ["parse", str(folder), "--out", tables, "--report"]),
        ("figures", [*plots, "--expect", *expected_figures]),
        ("report", ["parse.report", str(folder), "--from-tables", "--index"]),
    )
    worst, done = 0, set()
    for what, arguments in steps:
        command = [sys.executable, "-m", *arguments]
        # A session of its own: Ctrl-C is ours to answer, and ends it without a traceback.
        code = subprocess.run(command, cwd=ROOT, check=False, start_new_session=True).returncode
        worst = worst or code
        if code:
            cli.say(f"{what}: exit code {code}")
        if code in (0, 1):
            done.add(what)
        elif what == "tables":  # nothing can be drawn or told without them
            break
    if "report" in done:
        cli.say(f"report   {folder / 'report.html'}")
    if "figures" in done and any((folder / "figures").glob("*.*")):
        cli.say(f"figures  {folder / 'figures'}")
    return worst
