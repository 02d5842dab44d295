"""Pieces ``lanes``, ``bench``, ``4b`` and ``7b``: a sweep of a study of peers, told by the row.

``python -m benchmarks.gpu_check.rows FOLDER STUDY SWEEP SECONDS``. A row that keeps a timeline also
says how long each lane was busy in the last update; where none does, the rows are held against the
shortest times by the machine's rates.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import bound
from configs.study import load_study
from launch import cli, sweep
from launch.task import results_of


def last_update(run_dir: Path) -> dict[str, Any] | None:
    """The summary of a run's last update: busy seconds by lane; None without a timeline."""
    path = run_dir / "timeline" / "rank-0.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    rows: list[dict[str, Any]] = [json.loads(line) for line in lines if '"bound_by"' in line]
    return rows[-1] if rows else None


def told(folder: Path) -> list[str]:
    """Lines on the runs of a sweep's folder for a person."""
    lines = []
    for row in bound.read_rows(folder):
        parts = [f"{name} {float(row[f'{name}_median_ms']) / 1000:.3f} s" for name in _timed(row)]
        lines.append(f"{row['label']}: {', '.join([row['status'], *parts])}")
        if last := last_update((folder / row["path"]).parent):
            busy = ", ".join(f"{lane} {seconds:.3f}" for lane, seconds in last["busy_s"].items())
            length = last["end_s"] - last["begin_s"]
            lines.append(f"  last update {length:.3f} s, busy: {busy}")
    return lines


def _timed(row: Mapping[str, str]) -> list[str]:
    return [name for name in ("iteration", "update") if row[f"{name}_median_ms"]]


def main(argv: Sequence[str]) -> int:
    """Run and print; the sweep's exit code."""
    results, study_name, name, seconds = argv
    study, minutes = load_study(study_name), str(float(seconds) / 60)
    given = ["--study", study_name, "--sweep", name, "--minutes", minutes]
    code = sweep.main([*given, "--results-dir", results])
    folder = results_of(Path(results), study) / name
    lines = told(folder)
    findings = json.loads((folder / "tables" / "findings.json").read_text(encoding="utf-8"))
    for line in [*lines, *findings["lines"]]:
        sys.stdout.write(f"* {line}\n")
    if not any("busy" in line for line in lines):
        bound.main([str(folder), "--mark", "* "])
    return code


if __name__ == "__main__":
    sys.exit(cli.run_command(lambda: main(sys.argv[1:])))
