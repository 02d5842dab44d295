"""What the report of measured runs says, as plain data that its templates show."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from configs.fields import shaped_links
from configs.study import Study
from parse.compare.comparisons import NOT_COMPARED, PointComparison, timed_phases
from parse.compare.pairs import group_points
from parse.compare.present import log_notes
from parse.compare.stats import INSIDE_A_RUN, LEVEL, RESAMPLES, SEED
from parse.report.rows import claim, comparison_row, run_row, summary_rows, times_row
from parse.report.setup import command_of, hardware_rows, version_rows
from parse.run_folder import Run

_HEADLINES = 8
"""Comparisons up to which each has its line at the top; more are counted."""


def report_context(
    sweep_dir: Path,
    index: Mapping[str, Any],
    runs: Sequence[Run],
    comparisons: Sequence[PointComparison],
    warmup: int,
) -> dict[str, Any]:
    """Collect what the report says, figures aside.

    Args:
        sweep_dir: Folder that paths are shown relative to.
        index: The object of ``sweep.json``.
        runs: Runs of the sweep, labelled, in their order.
        comparisons: Points with the reference engine's points.
        warmup: First iterations left out of times.
    """
    groups, study = group_points(runs), runs[0].study
    rows = [run_row(run, sweep_dir, warmup) for run in runs]
    on_cpu = any(run.on_cpu for run in runs)
    not_run = _not_run(index)
    statuses = Counter(str(row["status"]) for row in rows).most_common()
    ratios = [item.ratio("iteration") for item in comparisons]
    return {
        "study": study_words(study),
        "warmup": warmup,
        "on_cpu": on_cpu,
        "measured": _measured(runs, on_cpu),
        "statuses": ", ".join(f"{n} {word}" for word, n in statuses),
        "headline": _headlines(comparisons, study),
        "phases": timed_phases(study),
        "summary": summary_rows(groups, comparisons, warmup, [row["engine"] for row in not_run]),
        "comparisons": [comparison_row(item) for item in comparisons],
        "one_run_intervals": any(r is not None and r.covers == INSIDE_A_RUN for r in ratios),
        "verdicts": [(f.label, f.verdict) for item in comparisons for f in item.findings],
        "times": [times_row(group, warmup) for group in groups],
        "runs": rows,
        "failed": [row for row in rows if row["status"] not in ("ok", "unknown")],
        "not_run": not_run,
        "versions": version_rows(runs),
        "hardware": hardware_rows(runs),
        "commands": [(run.label, text) for run in runs if (text := command_of(run))],
        "notes": [(run.label, note) for run in runs for note in log_notes(run.log)],
        "level": f"{LEVEL:.0%}",
        "resamples": RESAMPLES,
        "seed": SEED,
    }


def _measured(runs: Sequence[Run], on_cpu: bool) -> str:
    """How figures came about, behind every caption."""
    links = shaped_links(run.fields.get("link_mbit") for run in runs)
    place = "measured on a CPU" if on_cpu else "measured"
    return f"{place}, {links}" if links else place


def study_words(study: Study) -> dict[str, str]:
    """What a report says of its study: name, title, source, reference engine and gate."""
    return {
        "name": study.name,
        "title": study.title,
        "source": study.source,
        "reference": study.reference,
        "reference_title": study.engines[study.reference].title,
        "gate": study.gate.kind,
        "gate_words": study.gate.words,
    }


def _headlines(comparisons: Sequence[PointComparison], study: Study) -> list[str]:
    """A line for each comparison; of many, how many are equal and a line for those that are not."""
    if len(comparisons) <= _HEADLINES:
        return [_headline(item) for item in comparisons]
    words = Counter(item.equality for item in comparisons)
    shown = ", ".join(f"{n} {word}" for word, n in words.items())
    claimed = sum(not item.withheld for item in comparisons)
    lines = [
        f"{len(comparisons)} points against {study.reference}: {shown}",
        f"speed-ups: {claimed} claimed, {len(comparisons) - claimed} withheld (reasons below)",
    ]
    other = [item for item in comparisons if not all(f.holds for f in item.findings)]
    lines += [_headline(item) for item in other[:_HEADLINES]]
    more = len(other) - _HEADLINES
    return [*lines, f"and {more} more that are not"] if more > 0 else lines


def _headline(item: PointComparison) -> str:
    """A verdict; with the speed-up only where a GPU ran it and the verdict allows it."""
    line = f"{item.ours.label}: {item.verdict}"
    if item.equality == NOT_COMPARED or any(run.on_cpu for run in item.ours.runs):
        return line
    return f"{line}; speed-up {claim(item)}"


def _not_run(index: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Points that the sweep asks for and that have fewer runs than repeats."""
    points, runs = (
        [entry for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []
        for listed in (index.get("points"), index.get("runs"))
    )
    counts = Counter((str(run.get("name")), str(run.get("engine"))) for run in runs)
    found = []
    for point in points:
        name, engine = str(point.get("name")), str(point.get("engine"))
        asked = repeats if isinstance(repeats := point.get("repeats"), int) else 1
        done = counts[name, engine]
        if done < asked:
            found.append({"name": name, "engine": engine, "runs": done, "asked": asked})
    return found
