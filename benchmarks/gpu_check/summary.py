"""The summary of ``make gpu-check``, as text and as JSON. Standard library alone."""

from __future__ import annotations

import json
import shutil
import tarfile
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.gpu_check.driver import BUILT, OK, Check

SCHEMA_VERSION = 1
TEXT, JSON, ARCHIVE = "summary.txt", "summary.json", "logs.tar.gz"
_LOG_LINES = 12
"""Of the log of a piece that failed."""


def write_summary(check: Check, out: Path | None) -> None:
    """Write both forms into the check's folder.

    Args:
        check: What ran so far.
        out: Folder that gets the summary too, and every log and result in one archive; None for
            none.
    """
    content = {
        "schema_version": SCHEMA_VERSION,
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        "small": check.small,
        "facts": check.facts,
        "pieces": [{"name": name, **vars(found)} for name, found in check.records.items()],
    }
    (check.folder / JSON).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    (check.folder / TEXT).write_text(as_text(check), encoding="utf-8")
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        for name in (TEXT, JSON):
            shutil.copyfile(check.folder / name, out / name)
        _archive(check.folder, out / ARCHIVE)


def as_text(check: Check) -> str:
    """A line a piece, and below it what it found."""
    form = "small form, on the CPU" if check.small else "on the GPU"
    lines = [f"gpu-check, {form}: {check.facts.get('machine', 'unknown machine')}", ""]
    for name, record in check.records.items():
        reason = f"  {record.reason}" if record.reason else ""
        lines.append(f"{name:10} {record.status:11} {record.seconds:5.0f} s{reason}")
        lines += [f"    {line}" for line in record.lines]
        if record.status not in (OK, "left-out"):
            lines += [f"    | {line}" for line in _end_of_log(check.folder / name / "log")]
    counts: dict[str, int] = {}
    for record in check.records.values():
        counts[record.status] = counts.get(record.status, 0) + 1
    told = ", ".join(f"{count} {status}" for status, count in counts.items())
    return "\n".join((*lines, "", told, ""))


def _end_of_log(path: Path) -> list[str]:
    if not path.is_file():
        return []
    return path.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_LINES:]


def _archive(folder: Path, target: Path) -> None:
    """Everything but what was installed and compiled; whole, or as it was before."""
    beside = target.with_name(f".{target.name}")
    with tarfile.open(beside, "w:gz") as archive:
        for path in sorted(folder.iterdir()):
            if path.name != BUILT:
                archive.add(path, path.name)
    beside.replace(target)
