"""How a sweep went, for machines: ``summary.json`` and, as CI systems read it, ``junit.xml``."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from configs.files import as_json, printable, read_json, write_text
from launch import cli

SCHEMA_VERSION = 1
SUMMARY, JUNIT = "summary.json", "junit.xml"
NOT_RUN, LEFT_OUT = "not run", "left out"
"""In place of a status: of runs that are asked for and were not made, or cannot be made here."""


def write_summary(folder: Path, exit_code: int, has_findings: bool) -> None:
    """Write both files beside ``sweep.json``; one that cannot be written is said and passed over.

    Args:
        folder: ``RESULTS/SWEEP``.
        exit_code: of the call that ends.
        has_findings: whether its tables are of this call, so that comparisons can be taken from
            them.
    """
    index = read_json(folder / "sweep.json")
    findings = read_json(folder / "tables" / "findings.json") if has_findings else {}
    runs = [*_runs(folder, index), *_missing(index)]
    summary = {
        "schema_version": SCHEMA_VERSION,
        "sweep": str(index.get("name") or folder.name),
        "study": (index.get("study") or {}).get("name"),
        "ended": datetime.now(UTC).isoformat(timespec="seconds"),
        "exit_code": exit_code,
        "counts": dict(Counter(str(run["status"]) for run in runs)),
        "runs": runs,
        "findings": findings.get("findings", []),
    }
    for name, text in ((SUMMARY, as_json(summary)), (JUNIT, _junit(summary, folder))):
        try:
            write_text(folder / name, text)
        except OSError as error:
            cli.say(f"{folder / name}: not written: {error.strerror}")


def _runs(folder: Path, index: dict[str, Any]) -> list[dict[str, Any]]:
    found = []
    for run in index.get("runs", []):
        status = read_json(folder / str(run.get("run_dir")) / "status.json")
        about = {key: status.get(key) for key in ("seconds", "cause")}
        found.append({**run, **about})
    return found


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
    runs, findings = summary["runs"], summary["findings"]
    suite = ElementTree.Element("testsuite", name=printable(summary["sweep"]))
    suite.set("timestamp", summary["ended"])
    seconds = [run.get("seconds") or 0.0 for run in runs]
    repeats = any(run.get("repeat") != 1 for run in runs)
    for run, took in zip(runs, seconds, strict=True):
        name = f"{run['name']} #{run['repeat']}" if repeats else str(run["name"])
        case = _case(suite, f"{summary['sweep']}.runs", name, took)
        words = printable(str(run.get("cause") or ""))
        if run["status"] in (NOT_RUN, LEFT_OUT):
            ElementTree.SubElement(case, "skipped", message=words or NOT_RUN)
        elif run["status"] != "ok":
            failure = ElementTree.SubElement(case, "failure", type=printable(run["status"]))
            failure.set("message", words or printable(run["status"]))
            status = read_json(folder / str(run.get("run_dir")) / "status.json")
            failure.text = printable("\n".join(map(str, status.get("last_lines") or [])))
    for finding in findings:
        case = _case(suite, f"{summary['sweep']}.comparisons", str(finding.get("label")), 0.0)
        if not finding.get("holds"):
            verdict = printable(str(finding.get("verdict")))
            ElementTree.SubElement(case, "failure", type="comparison", message=verdict)
    for key, tag in (("tests", "testcase"), ("failures", "failure"), ("skipped", "skipped")):
        suite.set(key, str(sum(1 for _ in suite.iter(tag))))
    suite.set("errors", "0")
    suite.set("time", f"{sum(seconds):.3f}")
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def _case(suite: ElementTree.Element, group: str, name: str, seconds: float) -> ElementTree.Element:
    words = {
        "classname": printable(group),
        "name": printable(name),
        "time": f"{seconds:.3f}",
    }
    return ElementTree.SubElement(suite, "testcase", words)
