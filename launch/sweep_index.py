"""What a sweep's folder says of it: ``sweep.json``, and for other programs two summaries.

``sweep.json`` is what the sweep asks for and the run that stands for each point; ``summary.json``
and ``junit.xml``, as CI systems read it, are how it went.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from configs.cli import say
from configs.errors import ConfigError
from configs.files import as_json, printable, read_json, write_text
from configs.sweep import Sweep
from launch.records.ledger import Record, older
from launch.records.run_folder import SCHEMA_VERSION
from launch.task import Task

INDEX, SUMMARY, JUNIT = "sweep.json", "summary.json", "junit.xml"
SUMMARY_VERSION = 1
NOT_RUN, LEFT_OUT = "not run", "left out"
"""In place of a status: of runs that are asked for and were not made, or cannot be made here."""


def read_index(sweep_folder: Path) -> dict[str, Any]:
    """Return the object of ``sweep.json``; empty where there is none.

    Raises:
        ConfigError: it is damaged.
    """
    path = sweep_folder / INDEX
    mend = "the next call of its sweep makes it anew from the run folders"
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); {mend}") from None
    tables = [value.get(key, []) for key in ("points", "runs")] if isinstance(value, dict) else [0]
    for table in tables:
        if not isinstance(table, list) or not all(isinstance(item, dict) for item in table):
            raise ConfigError(f"{path}: is no index of a sweep; {mend}")
        if not all(isinstance(item.get("repeats", 1), int) for item in table):
            raise ConfigError(f"{path}: 'repeats' of a point is no whole number; {mend}")
    return dict(value)


def reasons_in_index(sweep_folder: Path) -> dict[str, str]:
    """Return why points were left out, by name; a damaged index is said, and has none."""
    try:
        points = read_index(sweep_folder).get("points", [])
    except ConfigError as error:
        say(str(error))
        return {}
    return {str(p.get("name")): str(p["skipped"]) for p in points if p.get("skipped")}


def write_index(
    sweep: Sweep,
    folder: Path,
    tasks: Sequence[Task],
    records: Sequence[Record],
    reasons: Mapping[str, str],
) -> None:
    """Write ``sweep.json`` anew from the run folders, see docs/design.md.

    Records, the newest last, stand for the tasks; reasons, by name, say why points were left out.
    """
    newest = {(record.point_key, record.repeat): record for record in records}
    have_run = {point_key for point_key, _ in newest}
    points, runs = [], []
    for task in tasks:
        point, key = task.point, task.point_key
        if task.repeat == 1:
            about: dict[str, Any] = {"name": point.name, "engine": point.engine}
            points.append({**about, "point_key": key, "repeats": sweep.repeats})
            if key not in have_run and point.name in reasons:
                points[-1]["skipped"] = reasons[point.name]
        if record := newest.get((key, task.repeat)):
            runs.append(_run(task, record, folder))
    index = {
        "schema_version": SCHEMA_VERSION,
        "name": sweep.name,
        "description": sweep.description,
        "figures": list(sweep.figures),
        "study": sweep.study.as_table(),
        "points": points,
        "runs": runs,
    }
    # It can be made again from the run folders at any time.
    _write(folder / INDEX, as_json(index))


def _run(task: Task, record: Record, folder: Path) -> dict[str, Any]:
    """A run, and what changed since where it is not of today's code."""
    table = {
        "name": task.point.name,
        "engine": record.engine,
        "repeat": record.repeat,
        "run_dir": Path(os.path.relpath(record.path, folder)).as_posix(),
        "log": record.log,
        "status": record.status,
    }
    changed = older(record, task.setup_key, task.setup)
    return {**table, "older": changed} if changed else table


def _write(path: Path, text: str) -> None:
    """Write a file; one that cannot be written is said and passed over."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text)
    except OSError as error:
        say(f"{path}: not written: {error.strerror}")


def write_summary(folder: Path, exit_code: int, has_findings: bool) -> None:
    """Write both summaries, with comparisons if the tables are of this call."""
    index = read_json(folder / INDEX)
    findings = read_json(folder / "tables" / "findings.json") if has_findings else {}
    runs = []
    for run in index.get("runs", []):
        status = read_json(folder / str(run.get("run_dir")) / "status.json")
        runs.append({**run, "seconds": status.get("seconds"), "cause": status.get("cause")})
    runs += _missing(index)
    summary = {
        "schema_version": SUMMARY_VERSION,
        "sweep": str(index.get("name") or folder.name),
        "study": (index.get("study") or {}).get("name"),
        "ended": datetime.now(UTC).isoformat(timespec="seconds"),
        "exit_code": exit_code,
        "counts": dict(Counter(str(run["status"]) for run in runs)),
        "runs": runs,
        "findings": findings.get("findings", []),
    }
    _write(folder / SUMMARY, as_json(summary))
    _write(folder / JUNIT, _junit(summary, folder))


def _missing(index: dict[str, Any]) -> list[dict[str, Any]]:
    """Runs that the sweep asks for and that there are none of."""
    there = Counter(str(run.get("name")) for run in index.get("runs", []))
    return [
        {
            "name": point.get("name"),
            "engine": point.get("engine"),
            "repeat": number,
            "status": LEFT_OUT if point.get("skipped") else NOT_RUN,
            "cause": str(point.get("skipped") or ""),
        }
        for point in index.get("points", [])
        for number in range(there[str(point.get("name"))] + 1, int(point.get("repeats") or 1) + 1)
    ]


def _junit(summary: dict[str, Any], folder: Path) -> str:
    """A case a run, failed unless it is ok, and a case a comparison, failed unless it holds."""
    runs, sweep = summary["runs"], printable(summary["sweep"])
    suite = ElementTree.Element("testsuite", name=sweep, timestamp=summary["ended"], errors="0")
    repeats = any(run.get("repeat") != 1 for run in runs)
    for run in runs:
        name = f"{run['name']} #{run['repeat']}" if repeats else str(run["name"])
        case = _case(suite, f"{sweep}.runs", name, run.get("seconds") or 0.0)
        status, words = printable(run["status"]), printable(str(run.get("cause") or ""))
        if status in (NOT_RUN, LEFT_OUT):
            ElementTree.SubElement(case, "skipped", message=words or NOT_RUN)
        elif status != "ok":
            failure = ElementTree.SubElement(case, "failure", type=status, message=words or status)
            lines = read_json(folder / str(run.get("run_dir")) / "status.json").get("last_lines")
            failure.text = printable("\n".join(map(str, lines or [])), "\n")
    for finding in summary["findings"]:
        case = _case(suite, f"{sweep}.comparisons", str(finding.get("label")), 0.0)
        if not finding.get("holds"):
            verdict = printable(str(finding.get("verdict")))
            ElementTree.SubElement(case, "failure", type="comparison", message=verdict)
    for key, tag in (("tests", "testcase"), ("failures", "failure"), ("skipped", "skipped")):
        suite.set(key, str(sum(1 for _ in suite.iter(tag))))
    suite.set("time", f"{sum(run.get('seconds') or 0.0 for run in runs):.3f}")
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def _case(suite: ElementTree.Element, group: str, name: str, seconds: float) -> ElementTree.Element:
    words = {"classname": group, "name": printable(name), "time": f"{seconds:.3f}"}
    return ElementTree.SubElement(suite, "testcase", words)
