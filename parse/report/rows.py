"""Rows of the report's tables: engines by case, comparisons, times, runs."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from configs.naming import Namer
from parse.compare.comparisons import PointComparison, timed_phases
from parse.compare.pairs import PointRuns
from parse.compare.stats import INSIDE_A_RUN, Ratio, Spread, spread
from parse.compare.two_runs import ON_CPU
from parse.compare.verdict import judge_log
from parse.run_folder import Run

MISSING = "missing"


def summary_rows(
    groups: Sequence[PointRuns],
    comparisons: Sequence[PointComparison],
    warmup: int,
    asked_for: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """One row a case and engine, engines in the study's order.

    An engine that the sweep has elsewhere, or was asked for, has a row in every case.

    Args:
        groups: Points of the sweep.
        comparisons: Points with the reference engine's points.
        warmup: First iterations left out of times.
        asked_for: Engines of points that were not run.
    """
    study = groups[0].runs[0].study
    namer = Namer(study)
    compared = {id(item.ours.runs[0]): item for item in comparisons}
    expected = {study.reference, *asked_for, *(str(g.engine) for g in groups if g.engine)}
    rows = []
    for title, members in _cases(groups):
        lines = [
            (namer.engine_key(group.runs[0].fields), _point_row(group, compared, warmup, namer))
            for group in members
        ]
        lines += [
            (namer.engine_key({"engine": name}), {**_NO_RUN, "engine": name})
            for name in expected - {str(group.engine) for group in members}
        ]
        lines.sort(key=lambda line: line[0])
        rows += [{"case": title, **row} for _, row in lines]
    return rows


_NO_RUN = {
    **{"text": MISSING, "state": MISSING, "value": None, "count": "no run"},
    **dict.fromkeys(("iqr", "equality", "speedup"), ""),
}


def comparison_row(item: PointComparison) -> dict[str, Any]:
    """A point against the reference: ratios of all phases, and the speed-up or why not."""
    ratio = item.ratio("iteration")
    phases = timed_phases(item.study)
    return {
        "label": item.ours.label,
        "reference": item.reference.label if item.reference else MISSING,
        "equality": item.equality,
        "ratios": [ratio_text(item.ratio(phase)) for phase in phases],
        "values": [r.ratio if (r := item.ratio(phase)) else None for phase in phases],
        "paired": "" if ratio is None or not ratio.covers else "yes" if ratio.paired else "no",
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


def times_row(group: PointRuns, warmup: int) -> dict[str, Any]:
    """Statistics of a point's phases over all its finished repeats."""
    phases = timed_phases(group.runs[0].study)
    spreads = [spread(group.times_ms(phase, warmup)) for phase in phases]
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
    last, older = run.status_json.get("last_lines"), run.recorded("older")
    return {
        "label": run.label,
        "status": run.status or "unknown",
        "ok": run.status == "ok",
        "seconds": f"{seconds:.1f}" if isinstance(seconds, int | float) else "",
        "cause": run.cause or (older and f"result of older code: {older}"),
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
        identity = json.dumps([group.key, group.preferred], default=str)
        cases.setdefault(identity, []).append(group)
    titles: dict[str, int] = {}
    found = []
    for members in cases.values():
        title = members[0].runs[0].case or "one point"
        titles[title] = titles.get(title, 0) + 1
        found.append((title if titles[title] == 1 else f"{title} #{titles[title]}", members))
    return found


def _ending(run: Run) -> str:
    """Why a run has no times that count."""
    return run.status if run.status not in ("", "ok") else "no iterations"


def _point_row(
    group: PointRuns, compared: dict[int, PointComparison], warmup: int, namer: Namer
) -> dict[str, Any]:
    found, item = spread(group.times_ms("iteration", warmup)), compared.get(id(group.runs[0]))
    row = {**_NO_RUN, "engine": namer.engine(group.runs[0].fields)}
    row["equality"] = item.equality if item else ""
    bad = [_ending(run) for run in group.runs if run not in group.finished]
    if found is None:
        text = ", ".join(dict.fromkeys(bad)) or "no times"
        return {**row, "text": text, "state": "bad", "count": ""}
    counts = [f"{found.iterations} in {found.repeats}"]
    counts += [f"{len(bad)} of {len(group.runs)} {bad[0]}"] if bad else []
    speedup = item.speedup("iteration") if item else None
    wrong = bad or (item and item.equality not in ("equal", "close"))
    return {
        **row,
        "text": f"{found.median_ms:.1f}",
        "state": "bad" if wrong else "ok",
        "value": found.median_ms,
        "iqr": f"{found.iqr_ms:.1f}",
        "count": "; ".join(counts),
        "speedup": "" if speedup is None else f"{speedup:.3f}x",
    }
