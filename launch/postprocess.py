"""What is made of runs: a verdict of each, and a sweep's tables, figures and report."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from configs.cli import say
from configs.errors import ConfigError
from launch.records import RunFolder, Status
from parse.log import read_log
from parse.records import LogError
from parse.verdict import FAILED, judge_log


def with_verdict(status: Status, folder: RunFolder) -> Status:
    """Return the status of a run: that of one which is ``ok`` is its loss's where that is bad.

    A log that cannot be read says nothing against a run.
    """
    if status.status != "ok":
        return status
    try:
        found = judge_log(read_log(folder.log))
    except LogError:
        return status
    if found.word not in FAILED:
        return status
    cause = f"ended, but its loss is {found.text}"
    return replace(status, status=found.word, exit_code=1, cause=cause)


def derive(folder: Path, expected_figures: Sequence[str]) -> int:
    """Make tables, figures and the report of a sweep folder.

    Args:
        folder: ``RESULTS/SWEEP``.
        expected_figures: what the sweep is to show; other figures are drawn where they can be.

    Returns:
        0, or the exit code of the first step that failed; the report's is not 0 when two engines'
        results are not equal.
    """
    # Imported here: whoever asks for --help need not wait for it.
    from parse.report import parse_sweep, report
    from plots.__main__ import main as draw

    parsed, drawn, told = None, 2, 2
    with _said("tables"):
        parsed = parse_sweep(folder)
    if parsed is None:  # nothing can be drawn or told without tables
        return 2
    tables, figures = folder / "tables", folder / "figures"
    with _said("figures"):
        drawn = draw([str(tables), "--out", str(figures), "--expect", *expected_figures])
    if drawn:
        say(f"figures: exit code {drawn}")
    with _said("report"):
        told = report(parsed)
        say(f"report   {folder / 'report.html'}")
    if drawn in (0, 1) and any(figures.glob("[!.]*.*")):
        say(f"figures  {figures}")
    return drawn or told


@contextmanager
def _said(step: str) -> Iterator[None]:
    """Say why a step failed; whatever it is, the next one is tried."""
    try:
        yield
    except BrokenPipeError:
        raise
    except ConfigError as error:
        say(f"{step}: {error}")
    except Exception as error:  # noqa: BLE001
        traceback.print_exc()
        say(f"{step}: {error}")
