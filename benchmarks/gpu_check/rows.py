"""Pieces ``lanes``, ``bench``, ``4b`` and ``7b``: a sweep of a study of peers, told by the row.

``python -m benchmarks.gpu_check.rows FOLDER STUDY SWEEP SECONDS``. A row that keeps a timeline also
says how long each lane was busy in the last update; where none does, the rows are held against the
shortest times by the machine's rates. No package is needed that only tables or figures need.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import bound
from configs.study import load_study
from launch import cli, sweep
from launch.task import results_of
from launch.trainers.limits import PLUGIN_BLOCK
from parse.compare.comparisons import compare_points
from parse.labels import label_runs
from parse.run_folder import Run, read_sweep


def last_update(run_dir: Path) -> dict[str, Any] | None:
    """The summary of a run's last update: busy seconds by lane; None without a timeline."""
    path = run_dir / "timeline" / "rank-0.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    rows: list[dict[str, Any]] = [json.loads(line) for line in lines if '"bound_by"' in line]
    return rows[-1] if rows else None


def told(run: Run) -> list[str]:
    """Lines on a run for a person."""
    times = {name: run.times_ms(name, bound.WARM_UP) for name in ("iteration", "update")}
    parts = [f"{name} {median(ms) / 1000:.3f} s" for name, ms in times.items() if ms]
    lines = [f"{run.label}: {', '.join([run.status, *parts])}"]
    if last := last_update(run.log.path.parent):
        busy = ", ".join(f"{lane} {seconds:.3f}" for lane, seconds in last["busy_s"].items())
        length = last["end_s"] - last["begin_s"]
        lines.append(f"  last update {length:.3f} s, busy: {busy}")
    return lines


def report(folder: Path) -> int:
    """Tell of a sweep's runs; 1 when one of the plugin's failed or differs from the reference.

    Other rows may do either: they run out of memory, or compute something else.
    """
    runs = read_sweep(folder)
    study = label_runs(runs)
    comparisons = compare_points(runs, bound.WARM_UP)
    lines = [line for run in runs for line in told(run)]
    found = [finding for item in comparisons for finding in item.findings]
    lines += [f"{finding.label}: {finding.verdict}" for finding in found]
    ours = {name for name, row in study.engines.items() if PLUGIN_BLOCK in row.ds_config}
    bad = [run.label for run in runs if run.engine in ours and run.status != "ok"]
    pairs = [pair for item in comparisons if item.ours.engine in ours for pair in item.pairs]
    bad += [pair.run.label for pair in pairs if pair.word not in ("", "equal")]
    lines += [f"FAILED OR DIFFERENT: {', '.join(bad)}"] if bad else []
    sys.stdout.write("".join(f"* {line}\n" for line in lines))
    sys.stdout.flush()
    return 1 if bad else 0


def main(argv: Sequence[str]) -> int:
    """Run and print; see :func:`report` for the exit code."""
    results, study_name, name, seconds = argv
    study, minutes = load_study(study_name), str(float(seconds) / 60)
    given = ["--study", study_name, "--sweep", name, "--minutes", minutes, "--no-report"]
    code = sweep.main([*given, "--results-dir", results])
    if code > 1:
        return code
    folder = results_of(Path(results), study) / name
    code = report(folder)
    if not any(folder.glob("*/*/timeline")):
        bound.main([str(folder), "--mark", "* "])
    return code


if __name__ == "__main__":
    sys.exit(cli.run_command(lambda: main(sys.argv[1:])))
