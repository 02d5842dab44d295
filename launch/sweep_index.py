"""``sweep.json``: what a sweep asks for, the run that stands for each point, and how it went."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from configs.cli import say
from configs.files import read_json, write_json
from configs.sweep import Sweep
from launch.execute import Task
from launch.records import SCHEMA_VERSION, Record, older

INDEX = "sweep.json"


def read_index(sweep_folder: Path) -> dict[str, Any]:
    """Return the object of ``sweep.json``; empty where there is none, or it is damaged.

    The next call of its sweep makes it anew from the run folders.
    """
    value = read_json(sweep_folder / INDEX)
    tables = [value.get(key, []) for key in ("points", "runs")]
    is_whole = all(
        isinstance(table, list) and all(isinstance(row, dict) for row in table) for table in tables
    )
    return value if is_whole else {}


def reasons_in_index(sweep_folder: Path) -> dict[str, str]:
    """Return why points were left out, by their names."""
    points = read_index(sweep_folder).get("points", [])
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
    A file that cannot be written is said and passed over.
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
    path = folder / INDEX
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(path, index)
    except OSError as error:
        say(f"{path}: not written: {error.strerror}")


def _run(task: Task, record: Record, folder: Path) -> dict[str, Any]:
    """A run, and what changed since where it is not of today's code."""
    table = {
        "name": task.point.name,
        "engine": record.engine,
        "repeat": record.repeat,
        "run_dir": Path(os.path.relpath(record.path, folder)).as_posix(),
        "log": record.log,
        "status": record.status,
        "seconds": record.seconds,
        "cause": record.cause,
    }
    changed = older(record, task.setup_key, task.setup)
    return {**table, "older": changed} if changed else table
