"""``sweep.json``: what a sweep asks for, and the run that stands for each of its points."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from configs.errors import ConfigError
from configs.files import write_json
from configs.sweep import Sweep
from launch import cli
from launch.records.ledger import Record, older
from launch.records.run_folder import SCHEMA_VERSION
from launch.task import Task

INDEX = "sweep.json"


def read_index(sweep_folder: Path) -> dict[str, Any]:
    """The object of ``sweep.json``; empty where there is none.

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
    """Why points were left out, by their names; a damaged index is said, and has none."""
    try:
        points = read_index(sweep_folder).get("points", [])
    except ConfigError as error:
        cli.say(str(error))
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

    Args:
        sweep: what is asked for.
        folder: ``RESULTS/SWEEP``.
        tasks: its runs.
        records: runs that may stand for them, the newest last.
        reasons: why points were left out, by their names.
    """
    newest = {(record.point_key, record.repeat): record for record in records}
    found = [(task, newest.get((task.point_key, task.repeat))) for task in tasks]
    index = {
        "schema_version": SCHEMA_VERSION,
        "name": sweep.name,
        "description": sweep.description,
        "figures": list(sweep.figures),
        "study": sweep.study.as_table(),
        "points": [_point(task, sweep, newest, reasons) for task in tasks if task.repeat == 1],
        "runs": [_run(task, record, folder) for task, record in found if record is not None],
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / INDEX, index)
    except OSError as error:
        # It can be made again from the run folders at any time.
        cli.say(f"{folder / INDEX}: not written: {error.strerror}")


def _point(
    task: Task, sweep: Sweep, newest: Mapping[tuple[str, int], Record], reasons: Mapping[str, str]
) -> dict[str, Any]:
    """A point, and why it has no run where that is known."""
    name, engine = task.point.name, task.point.engine
    table = {"name": name, "engine": engine, "point_key": task.point_key, "repeats": sweep.repeats}
    has_run = any(key == task.point_key for key, _ in newest)
    return table if has_run or name not in reasons else {**table, "skipped": reasons[name]}


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
