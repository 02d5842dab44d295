"""What is made of a sweep's runs: tables, figures and the report."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from pathlib import Path

from launch import cli
from parse.records import LogError


def derive(folder: Path, expected_figures: Sequence[str]) -> int:
    """Make tables, figures and the report of a sweep folder.

    Args:
        folder: ``RESULTS/SWEEP``.
        expected_figures: what the sweep is to show; other figures are drawn where they can be.

    Returns:
        0, or the exit code of the first step that failed; the report's is not 0 when two engines'
        results are not equal.
    """
    # Imported here: whoever asks for --help need not wait for pandas and matplotlib.
    from parse.report import parse_sweep, report

    try:
        parsed = parse_sweep(folder)
    except LogError as error:  # nothing can be drawn or told without tables
        cli.say(f"tables: {error}")
        return 2
    drawn = _draw(folder, expected_figures)
    try:
        told = report(parsed, index=True)
        cli.say(f"report   {folder / 'report.html'}")
    except LogError as error:
        told = 2
        cli.say(f"report: {error}")
    if drawn in (0, 1) and any((folder / "figures").glob("*.*")):
        cli.say(f"figures  {folder / 'figures'}")
    return drawn or told


def _draw(folder: Path, expected: Sequence[str]) -> int:
    """Draw what the tables show; no error in a figure may cost the report."""
    from plots.__main__ import main

    words = [str(folder / "tables"), "--out", str(folder / "figures"), "--expect", *expected]
    try:
        code = main(words)
    except Exception:  # noqa: BLE001 - whatever it is, the report comes after it
        traceback.print_exc()
        code = 2
    if code:
        cli.say(f"figures: exit code {code}")
    return code
