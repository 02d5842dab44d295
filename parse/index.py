"""The index of a results folder: its sweeps, and the same points measured, simulated, published."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from urllib.parse import quote

from configs.errors import ConfigError
from configs.files import read_json, write_text
from configs.naming import Namer
from configs.study import Study, study_from
from parse.records import LogError
from parse.render import render_html
from parse.run import MEASURED, PUBLISHED, SIMULATED, SWEEP_FILE
from parse.tables import STUDY_FILE, writing

INDEX_FILE = "index.html"
FINDINGS_FILE = "findings.json"
"""Beside the tables of a sweep: what the index and programs say of it."""
MARK = "report_of_sweep"
"""A ``findings.json`` of ours has this key."""
_PAGE_MARK = '<meta name="generator" content="parse.report --index">'
"""A page of ours holds it."""
_CORE = ("model", "tp", "dp", "micro_batch_size", "accumulation")
"""Fields that the same point has wherever its numbers come from, beside those of its study."""
_MOST_LINES = 3
"""Of a sweep; the others are in its report."""


def results_folder(sweep_dir: Path) -> Path:
    """Return the folder of results that a sweep, run or simulated, lies in."""
    parent = sweep_dir.resolve().parent
    return parent.parent if parent.name.startswith("simulated-") else parent


def write_index(results: Path) -> Path:
    """Write ``index.html`` of all sweeps of a results folder that have a report.

    Raises:
        LogError: there is none, a file of that name is not ours, or it cannot be written.
    """
    found = sorted(
        path.parent.parent
        for depth in ("*", "simulated-*/*")
        for path in results.glob(f"{depth}/tables/{FINDINGS_FILE}")
    )
    sweeps = {
        sweep.relative_to(results).as_posix(): sweep
        for sweep in found
        if (sweep / SWEEP_FILE).is_file() and (sweep / "report.html").is_file()
    }
    if not sweeps:
        raise LogError(f"{results}: holds no sweep with a report")
    path = results / INDEX_FILE
    with writing(results):
        if path.exists() and _PAGE_MARK not in path.read_text(encoding="utf-8", errors="replace"):
            raise LogError(f"{path}: is not an index of ours; move it away")
        rows = [_sweep_row(sweep, name) for name, sweep in sweeps.items()]
        context = {"name": results.resolve().name, "sweeps": rows, "mark": _PAGE_MARK}
        page = render_html(context | _several_sources(sweeps), "index")
        write_text(path, page.encode(errors="replace").decode())
    return path


def _sweep_row(sweep: Path, name: str) -> dict[str, Any]:
    found = read_json(sweep / "tables" / FINDINGS_FILE)
    lines = found.get("headline") or []
    return {
        "name": found.get(MARK, name),
        **{key: found.get(key, "") for key in ("description", "study", "source", "runs", "state")},
        "headline": lines[:_MOST_LINES],
        "more": max(0, len(lines) - _MOST_LINES),
        "link": "./" + quote(f"{name}/report.html", errors="replace"),
    }


class _Point(NamedTuple):
    """What is known of a point's iterations."""

    study: Study
    fields: dict[str, Any]
    times: dict[str, dict[str, list[float]]]
    """In ms, of each source, by the sweep that knows them."""


def _several_sources(sweeps: Mapping[str, Path]) -> dict[str, Any]:
    """Points of which two sources know the iteration: measured, simulated by machine, published.

    Nothing is pooled over sweeps: a point that two of them measured has two rows.
    """
    found: dict[tuple[Any, ...], _Point] = {}
    for name, sweep in sweeps.items():
        for key, point, source, iteration_ms in _iterations(sweep / "tables"):
            known = found.setdefault(key, point).times.setdefault(source, {})
            known.setdefault(name, []).append(iteration_ms)
    points = [point for point in found.values() if len(point.times) > 1]
    names = dict.fromkeys(name for point in points for name in _shared(point.study)[1:])
    varying = [n for n in names if len({str(point.fields.get(n)) for point in points}) > 1]
    predicted = sorted({s for p in points for s in p.times if s.startswith(SIMULATED)})
    others = [*predicted, PUBLISHED]
    rows = [row for point in points for row in _rows(point, varying, others)]
    return {"others": others, "beside": rows}


def _shared(study: Study) -> list[str]:
    """Settings that belong to no engine."""
    return [*_CORE, *(name for name, row in study.fields.items() if not row.only_some_engines)]


def _rows(point: _Point, varying: Sequence[str], others: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The medians, and by how much those of ``others`` are off the measured one."""
    # Of the first sweep that knows the point: predictions of one machine are all the same.
    known = ([median(times) for times in point.times.get(s, {}).values()] for s in others)
    theirs = [medians[0] if medians else None for medians in known]
    label = Namer(point.study).name(point.fields, varying)
    for sweep, times in point.times.get(MEASURED, {"": []}).items():
        measured = median(times) if times else None
        off = [f"{m / measured - 1:+.0%}" if m and measured else "" for m in theirs]
        cells = ["" if value is None else f"{value:.0f}" for value in (measured, *theirs)]
        yield {"label": label, "sweep": sweep, "cells": [*cells, *off]}


def _iterations(tables: Path) -> Iterator[tuple[tuple[Any, ...], _Point, str, float]]:
    """What sets a point apart, the point, its source and each iteration that counts, in ms.

    A run of which no iteration is known has its own time.
    """
    try:
        study = study_from(read_json(tables / STUDY_FILE), str(tables / STUDY_FILE))
        runs, iterations = (_table(tables / f"{name}.csv") for name in ("runs", "iterations"))
    except (ConfigError, OSError):
        return  # A sweep that is being written has no numbers to show here.
    about = read_json(tables.parent / SWEEP_FILE).get(SIMULATED)
    machine = about.get("machine") if isinstance(about, dict) else "an unknown machine"
    times: dict[str, list[str]] = {}
    for row in iterations:
        if row.get("warmup") != "1":
            times.setdefault(row["path"], []).append(row["iteration_ms"])
    for row in runs:
        fields = {name: _value(row.get(name, "")) for name in (*_CORE, *study.fields)}
        known = {name: value for name, value in fields.items() if value is not None}
        settings = [known.get(n, study.all_fields[n].default) for n in _shared(study)]
        point = {**known, "engine": row["engine"]}
        key = (study.name, *map(str, settings), Namer(study).engine_key(point))
        source = row["source"]
        source = f"{SIMULATED} on {machine}" if source == SIMULATED else source
        for cell in times.get(row["path"]) or [row["iteration_median_ms"]]:
            if cell and row["status"] in ("", "ok"):
                yield key, _Point(study, point, {}), source, float(cell)


def _value(cell: str) -> float | str | None:
    try:
        return float(cell)
    except ValueError:
        return cell or None


def _table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))
