"""Everything the report's templates show, as plain data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from parse.compare.comparisons import NOT_COMPARED, TIMED_PHASES, PointComparison
from parse.compare.pairs import group_points
from parse.compare.present import log_notes
from parse.compare.stats import INSIDE_A_RUN, LEVEL, RESAMPLES, SEED
from parse.report.figures import FigureFile, find_figures
from parse.report.rows import (
    claim,
    comparison_row,
    run_row,
    summary_rows,
    times_row,
    verdict_of,
)
from parse.report.setup import command_of, hardware_rows, version_rows
from parse.run_folder import Run

_HEADLINES = 8
"""Comparisons up to which each has its line at the top; more are counted."""
TABLES = ("runs", "iterations", "comparisons", "memory", "monitor")


def report_context(
    sweep_dir: Path,
    index: dict[str, Any],
    runs: Sequence[Run],
    comparisons: Sequence[PointComparison],
    warmup: int,
) -> dict[str, Any]:
    """Collect what the report says.

    Args:
        sweep_dir: Folder that paths are shown relative to.
        index: The object of ``sweep.json``.
        runs: Runs of the sweep, labelled, in their order.
        comparisons: Plugin points with their vanilla points.
        warmup: First iterations left out of times.
    """
    groups = group_points(runs)
    wanted = index.get("figures")
    wanted = [str(name) for name in wanted] if isinstance(wanted, list) else []
    figures = find_figures(sweep_dir / "figures", wanted)
    rows = [run_row(run, sweep_dir, warmup) for run in runs]
    on_cpu = any(run.on_cpu for run in runs)
    return {
        "name": str(index.get("name") or sweep_dir.name),
        "description": str(index.get("description") or ""),
        "warmup": warmup,
        "on_cpu": on_cpu,
        "measured": "measured on a CPU" if on_cpu else "measured",
        "statuses": ", ".join(f"{n} {word}" for word, n in _statuses(rows)),
        "headline": _headlines(comparisons),
        "phases": TIMED_PHASES,
        "summary": summary_rows(groups, comparisons, warmup),
        "comparisons": [comparison_row(item) for item in comparisons],
        "one_run_intervals": any(
            (ratio := item.ratio("iteration")) and ratio.covers == INSIDE_A_RUN
            for item in comparisons
        ),
        "verdicts": [(pair.run.label, pair.verdict) for item in comparisons for pair in item.pairs],
        "times": [times_row(group, warmup) for group in groups],
        "runs": rows,
        "failed": [row for row in rows if row["status"] not in ("ok", "unknown")],
        "not_run": _not_run(index),
        "figures": [figure_entry(figure, on_cpu) for figure in figures],
        "not_drawn": [name for name in wanted if name not in {f.stem for f in figures}],
        "versions": version_rows(runs),
        "hardware": hardware_rows(runs),
        "commands": [(run.label, text) for run in runs if (text := command_of(run))],
        "notes": [(run.label, note) for run in runs for note in log_notes(run.log)],
        "tables": [name for name in TABLES if (sweep_dir / "tables" / f"{name}.csv").is_file()],
        "level": f"{LEVEL:.0%}",
        "resamples": RESAMPLES,
        "seed": SEED,
    }


def _headlines(comparisons: Sequence[PointComparison]) -> list[str]:
    """A line for each comparison; of many, how many are equal and a line for those that are not."""
    if len(comparisons) <= _HEADLINES:
        return [_headline(item) for item in comparisons]
    words = Counter(item.equality for item in comparisons)
    shown = ", ".join(f"{n} {word}" for word, n in words.items())
    claimed = sum(not item.withheld for item in comparisons)
    lines = [
        f"{len(comparisons)} plugin points against vanilla: {shown}",
        f"speed-ups: {claimed} claimed, {len(comparisons) - claimed} withheld (reasons below)",
    ]
    other = [item for item in comparisons if item.equality != "equal"]
    lines += [_headline(item) for item in other[:_HEADLINES]]
    more = len(other) - _HEADLINES
    return [*lines, f"and {more} more that are not equal"] if more > 0 else lines


def _headline(item: PointComparison) -> str:
    """A verdict; with the speed-up only where a GPU ran it and the verdict allows it."""
    line = f"{item.ours.label}: {verdict_of(item)}"
    if item.equality == NOT_COMPARED or any(run.on_cpu for run in item.ours.runs):
        return line
    return f"{line}; speed-up {claim(item)}"


def _statuses(rows: Sequence[dict[str, Any]]) -> list[tuple[str, int]]:
    return Counter(str(row["status"]) for row in rows).most_common()


def _not_run(index: dict[str, Any]) -> list[dict[str, Any]]:
    """Points that the sweep asks for and that have fewer runs than repeats."""
    points, runs = index.get("points"), index.get("runs")
    runs = [run for run in runs if isinstance(run, dict)] if isinstance(runs, list) else []
    counts = Counter((str(run.get("name")), str(run.get("engine"))) for run in runs)
    found = []
    for point in points if isinstance(points, list) else []:
        if not isinstance(point, dict):
            continue
        name, engine = str(point.get("name")), str(point.get("engine"))
        asked = point.get("repeats")
        asked = asked if isinstance(asked, int) else 1
        if counts[name, engine] < asked:
            found.append(
                {"name": name, "engine": engine, "runs": counts[name, engine], "asked": asked}
            )
    return found


def figure_entry(figure: FigureFile, on_cpu: bool = False) -> dict[str, Any]:
    """A figure with its links, relative to the report."""
    source = figure.source
    links = {
        kind: f"./figures/{quote(path.name, errors='replace')}"
        for kind, path in figure.paths.items()
    }
    return {
        "stem": figure.stem,
        "title": figure.title,
        "source": f"{source} on a CPU" if on_cpu and source == "measured" else source,
        "description": figure.description,
        "links": links,
        "image": links.get("png") or links["svg"],
        "data_uri": figure.data_uri,
    }
