"""Rows of the report's tables: points in three columns, comparisons, times, runs."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from parse.compare.comparisons import TIMED_PHASES, PointComparison
from parse.compare.pairs import PointRuns, point_key, preferred
from parse.compare.stats import INSIDE_A_RUN, Ratio, Spread, spread
from parse.compare.two_runs import ON_CPU
from parse.compare.verdict import judge_log
from parse.log.records import Setting
from parse.run_folder import Run

ENGINES = ("vanilla", "async-gradients", "hybrid")
"""The three columns, always."""
MISSING = "missing"


@dataclass(frozen=True)
class Cell:
    """What a point shows in its column."""

    text: str
    detail: str
    state: str
    """``ok``, ``missing`` or ``bad``."""
    value: float | None
    """Median of the iteration in ms, to sort by."""


def summary_rows(
    groups: Sequence[PointRuns], comparisons: Sequence[PointComparison], warmup: int
) -> list[dict[str, Any]]:
    """One row a case, and one more for each further stride of it; three cells each."""
    compared = {id(item.ours.runs[0]): item for item in comparisons}
    rows = []
    for title, members in _cases(groups):
        columns = [[g for g in members if g.engine == engine] for engine in ENGINES]
        first = [next(iter(column), None) for column in columns]
        for hybrid in columns[2] or first[2:]:
            cells = [_cell(point, compared, warmup) for point in (*first[:2], hybrid)]
            rows.append({"case": title, "stride": _stride(hybrid), "cells": cells})
    return rows


def comparison_row(item: PointComparison) -> dict[str, Any]:
    """A plugin point against vanilla: ratios of all phases, and the speed-up or why not."""
    speedup = item.speedup("iteration")
    ratio = item.ratio("iteration")
    return {
        "label": item.ours.label,
        "reference": item.reference.label if item.reference else MISSING,
        "equality": item.equality,
        "ratios": [ratio_text(item.ratio(phase)) for phase in TIMED_PHASES],
        "values": [r.ratio if (r := item.ratio(phase)) else None for phase in TIMED_PHASES],
        "paired": "" if ratio is None or not ratio.covers else "yes" if ratio.paired else "no",
        "covers": ratio.covers if ratio else "",
        "speedup": "" if speedup is None else f"{speedup:.3f}x",
        "claim": claim(item),
    }


def claim(item: PointComparison) -> str:
    """The speed-up with its interval, or why there is none."""
    ratio = item.ratio("iteration")
    if item.speedup("iteration") is None or ratio is None:
        if item.withheld == ON_CPU:
            return f"none claimed: {ON_CPU}"
        return f"withheld: {item.withheld}"
    if ratio.low is None:
        return f"{ratio.ratio:.3f}x (too few iterations for an interval)"
    return f"{ratio.ratio:.3f}x (95% interval {ratio.low:.3f} to {ratio.high:.3f})"


def verdict_of(item: PointComparison) -> str:
    """The verdict of a point over its repeats."""
    first = item.pairs[0].verdict
    if len(item.pairs) == 1:
        return first
    equal = sum(pair.equal for pair in item.pairs)
    if equal == len(item.pairs):
        return f"{first}, in each of {equal} repeats"
    worst = next(pair for pair in item.pairs if not pair.equal)
    return f"{worst.verdict}; {equal} of {len(item.pairs)} repeats are equal"


def times_row(group: PointRuns, warmup: int) -> dict[str, Any]:
    """Statistics of a point's phases over all its finished repeats."""
    spreads = [spread(group.times_ms(phase, warmup)) for phase in TIMED_PHASES]
    whole = spreads[0]
    return {
        "label": group.label,
        "spreads": [(spread_text(s), s.median_ms if s else None) for s in spreads],
        "iterations": whole.iterations if whole else 0,
        "repeats": whole.repeats if whole else 0,
    }


def run_row(run: Run, sweep_dir: Path, warmup: int) -> dict[str, Any]:
    """What became of a run."""
    seconds = run.status_json.get("seconds")
    times = spread(PointRuns([run], run.label).times_ms("iteration", warmup))
    last = run.status_json.get("last_lines")
    return {
        "label": run.label,
        "status": run.status or "unknown",
        "ok": run.status == "ok",
        "seconds": f"{seconds:.1f}" if isinstance(seconds, int | float) else "",
        "cause": run.cause,
        "iterations": len(run.log.iterations),
        "iteration": spread_text(times) if times else "",
        "iteration_ms": times.median_ms if times else None,
        "rejects": len(run.log.rejects),
        "loss": judge_log(run.log).text,
        "link": link_to(run.log.path, sweep_dir) if run.log.path.is_file() else "",
        "last_lines": [str(line) for line in last] if isinstance(last, list) else [],
    }


def link_to(path: Path, folder: Path) -> str:
    """A file as a relative link; empty where it does not lie below the folder.

    Every character that could end the link or make it another scheme is percent-encoded.
    """
    try:
        relative = Path(os.path.normpath(path)).relative_to(os.path.normpath(folder))
        return "./" + quote(os.fsencode(relative.as_posix()))
    except ValueError:
        return ""


def spread_text(found: Spread | None) -> str:
    """``130.9 (18.5) / 131.2``: median, IQR and mean in ms."""
    if found is None:
        return MISSING
    return f"{found.median_ms:.1f} ({found.iqr_ms:.1f}) / {found.mean_ms:.1f}"


def ratio_text(ratio: Ratio | None) -> str:
    """``1.392 [1.301, 1.450]``; a star where the interval knows of one repeat alone."""
    if ratio is None:
        return MISSING
    if ratio.low is None:
        return f"{ratio.ratio:.3f}"
    star = "*" if ratio.covers == INSIDE_A_RUN else ""
    return f"{ratio.ratio:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]{star}"


def _cases(groups: Sequence[PointRuns]) -> list[tuple[str, list[PointRuns]]]:
    """Points by case, engines left out, each with a title of its own."""
    cases: dict[str, list[PointRuns]] = {}
    for group in groups:
        run = group.runs[0]
        identity = json.dumps([point_key(run), preferred(run)], default=str)
        cases.setdefault(identity, []).append(group)
    titles: dict[str, int] = {}
    found = []
    for members in cases.values():
        run = members[0].runs[0]
        title = run.case or str(run.log.settings.get("model") or "one point")
        titles[title] = titles.get(title, 0) + 1
        found.append((title if titles[title] == 1 else f"{title} #{titles[title]}", members))
    return found


def _ending(run: Run) -> str:
    """Why a run has no times that count."""
    return run.status if run.status not in ("", "ok") else "no iterations"


def _stride(group: PointRuns | None) -> Setting:
    return "" if group is None else group.settings.get("stride", "")


def _cell(group: PointRuns | None, compared: dict[int, PointComparison], warmup: int) -> Cell:
    if group is None:
        return Cell(MISSING, "no run", MISSING, None)
    found = spread(group.times_ms("iteration", warmup))
    bad = [_ending(run) for run in group.runs if run not in group.finished]
    if found is None:
        return Cell(", ".join(dict.fromkeys(bad)) or "no times", "", "bad", None)
    item = compared.get(id(group.runs[0]))
    parts = [f"IQR {found.iqr_ms:.1f}, n {found.iterations} in {found.repeats}"]
    parts += [item.equality] if item else []
    if item and (speedup := item.speedup("iteration")) is not None:
        parts += [f"{speedup:.3f}x"]
    parts += [f"{len(bad)} of {len(group.runs)} {bad[0]}"] if bad else []
    wrong = bad or (item and item.equality not in ("equal", "close"))
    return Cell(
        f"{found.median_ms:.1f}", "; ".join(parts), "bad" if wrong else "ok", found.median_ms
    )
