"""A sweep parsed once: its tables, and beside them what its report says of them.

Figures are drawn from the tables, and the report shows figures; so what the report says is kept in
``findings.json`` until they are drawn, and no log is read twice.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from configs.files import read_json
from parse.compare.comparisons import Finding, compare_points, write_comparisons
from parse.errors import LogError
from parse.labels import label_runs
from parse.report.context import report_context
from parse.report.simulated import simulated_context
from parse.run_folder import SWEEP_FILE, Run, read_sweep
from parse.table import write_tables
from parse.unmeasured import MEASURED
from parse.write import check_our_json, replace_text

FINDINGS_FILE = "findings.json"
_MARK = "report_of_sweep"
"""A file of ours has this key."""


def parse_sweep(sweep_dir: Path, out: Path, warmup: int) -> tuple[list[Run], list[Path]]:
    """Write tables, ``study.json`` and ``findings.json`` of a sweep folder.

    Paths in the tables are relative to the sweep folder, and runs without a log are among them.

    Returns:
        The runs, labelled, and the tables' CSV files.

    Raises:
        LogError: the folder holds no sweep with a run in it, or cannot be written.
    """
    if not (sweep_dir / SWEEP_FILE).is_file():
        raise LogError(f"{sweep_dir}: has no {SWEEP_FILE}; give the folder of a sweep")
    runs = read_sweep(sweep_dir)
    if not runs:
        raise LogError(f"{sweep_dir / SWEEP_FILE}: lists no runs, or cannot be read")
    study = label_runs(runs)
    check_our_json(out / FINDINGS_FILE, _MARK)
    written = write_tables(runs, out, warmup, base=sweep_dir)
    comparisons = compare_points(runs, warmup)
    written.append(write_comparisons(comparisons, study, out))
    index = read_json(sweep_dir / SWEEP_FILE)
    measured = all(run.source == MEASURED for run in runs)
    if measured:
        context = report_context(sweep_dir, index, runs, comparisons, warmup)
    else:
        context = simulated_context(index, runs, comparisons)
    wanted = index.get("figures")
    position = {run.label: number for number, run in enumerate(runs)}
    found = [finding for item in comparisons for finding in item.findings if measured]
    found.sort(key=lambda finding: position.get(finding.label, 0))
    # A loss that failed is told of runs that nothing is compared with, too: the reference's.
    told = {finding.label for finding in found}
    failed = [run for run in runs if run.loss.failed and run.label not in told]
    found += [Finding(run.label, f"the loss is {run.loss.text}", holds=False) for run in failed]
    findings = {
        _MARK: str(index.get("name") or sweep_dir.name),
        "description": str(index.get("description") or ""),
        "template": "report" if measured else "simulated",
        "wanted": [str(name) for name in wanted] if isinstance(wanted, list) else [],
        "titles": {name: figure.title for name, figure in study.figures.items()},
        "lines": [f"{finding.label}: {finding.verdict}" for finding in found],
        "findings": [vars(finding) for finding in found],
        "all_hold": all(finding.holds for finding in found),
        "context": context,
    }
    try:
        replace_text(out / FINDINGS_FILE, json.dumps(findings, indent=1) + "\n")
    except OSError as error:
        raise LogError(f"{out / FINDINGS_FILE}: cannot be written: {error.strerror}") from None
    return runs, written


def read_findings(folder: Path) -> dict[str, Any]:
    """What :func:`parse_sweep` left in a folder of tables; ``name`` is the sweep's.

    Raises:
        LogError: there is none.
    """
    findings = read_json(folder / FINDINGS_FILE)
    if _MARK not in findings:
        raise LogError(
            f"{folder / FINDINGS_FILE}: is missing or damaged; make it with "
            "python -m parse SWEEP_DIR --out DIR --report"
        )
    return {**findings, "name": findings[_MARK]}
