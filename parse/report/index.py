"""The index of a results folder: its sweeps, and the same points measured, simulated, published."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import quote

from configs.errors import ConfigError
from configs.files import read_json
from configs.naming import Namer
from configs.study import Study, study_from
from parse.errors import LogError
from parse.report.findings import FINDINGS_FILE, read_findings
from parse.report.render import render_html
from parse.run_folder import SWEEP_FILE
from parse.unmeasured import MEASURED, PUBLISHED, SIMULATED
from parse.write import replace_text

INDEX_FILE = "index.html"
_MARK = '<meta name="generator" content="parse.report --index">'
"""A page of ours holds it."""
_CORE = ("model", "tp", "dp", "micro_batch_size", "accumulation")
"""Fields that the same point has wherever its numbers come from, beside those of its study."""

_MOST_LINES = 3
"""Of a sweep; the others are in its report."""


def results_folder(sweep_dir: Path) -> Path:
    """The folder of results that a sweep, run or simulated, lies in."""
    parent = sweep_dir.resolve().parent
    return parent.parent if parent.name.startswith("simulated-") else parent


def write_index(results: Path) -> Path:
    """Write ``index.html`` of all sweeps of a results folder that have a report.

    Raises:
        LogError: there is none, a file of that name is not ours, or it cannot be written.
    """
    sweeps = sorted(
        path.parent.parent
        for depth in ("*", "simulated-*/*")
        for path in results.glob(f"{depth}/tables/{FINDINGS_FILE}")
        if (path.parent.parent / SWEEP_FILE).is_file()
    )
    rows = [_sweep_row(sweep, results) for sweep in sweeps if (sweep / "report.html").is_file()]
    if not rows:
        raise LogError(f"{results}: holds no sweep with a report")
    path = results / INDEX_FILE
    try:
        if path.exists() and _MARK not in path.read_text(encoding="utf-8", errors="replace"):
            raise LogError(f"{path}: is not an index of ours; move it away")
        context = {"name": results.resolve().name, "sweeps": rows, "mark": _MARK}
        context |= _beside({sweep.relative_to(results).as_posix(): sweep for sweep in sweeps})
        replace_text(path, render_html(context, "index"))
    except OSError as error:
        raise LogError(f"{path}: cannot be written: {error.strerror}") from None
    return path


def _sweep_row(sweep: Path, results: Path) -> dict[str, Any]:
    findings = read_findings(sweep / "tables")
    context = findings["context"]
    simulated = findings["template"] == "simulated"
    lines = context["deviation"] if simulated else context["headline"]
    return {
        "name": findings["name"],
        "description": findings["description"],
        "study": context["study"]["name"],
        "source": f"simulated on {context['machine']}" if simulated else context["measured"],
        "runs": f"{len(context['points'])} predicted" if simulated else context["statuses"],
        "state": "" if simulated else "ok" if findings["all_hold"] else "bad",
        "headline": lines[:_MOST_LINES],
        "more": max(0, len(lines) - _MOST_LINES),
        "link": "./" + quote((sweep / "report.html").relative_to(results).as_posix()),
    }


def _beside(sweeps: Mapping[str, Path]) -> dict[str, Any]:
    """Points of which two sources know the iteration: measured, simulated by machine, published.

    Nothing is pooled over sweeps: a point that two of them measured has two rows.
    """
    found: dict[tuple[Any, ...], _Point] = {}
    for name, sweep in sweeps.items():
        for key, point, source, iteration_ms in _iterations(sweep / "tables"):
            known = found.setdefault(key, point).times.setdefault(source, {})
            known.setdefault(name, []).append(iteration_ms)
    points = [point for point in found.values() if len(point.times) > 1]
    names = dict.fromkeys(name for point in points for name in point.shared)
    varying = [n for n in names if len({str(point.fields.get(n)) for point in points}) > 1]
    predicted = sorted({s for p in points for s in p.times if s.startswith(SIMULATED)})
    others = [*predicted, PUBLISHED]
    rows = [row for point in points for row in point.rows(varying, others)]
    return {"others": others, "beside": rows}


@dataclass
class _Point:
    """What is known of a point's iterations."""

    study: Study
    fields: dict[str, Any]
    times: dict[str, dict[str, list[float]]]
    """In ms, of each source, by the sweep that knows them."""

    @property
    def shared(self) -> list[str]:
        """Settings that belong to no engine, the model aside."""
        fields = self.study.fields.items()
        return [*_CORE[1:], *(name for name, row in fields if not row.only_some_engines)]

    def rows(self, varying: Sequence[str], others: Sequence[str]) -> Iterator[dict[str, Any]]:
        """The medians, and by how much those of ``others`` are off the measured one."""
        label = Namer(self.study).name(self.fields, varying)
        theirs = [self._median(source) for source in others]
        for sweep, times in self.times.get(MEASURED, {"": []}).items():
            measured = median(times) if times else None
            off = [f"{m / measured - 1:+.0%}" if m and measured else "" for m in theirs]
            cells = ["" if value is None else f"{value:.0f}" for value in (measured, *theirs)]
            yield {"label": label, "sweep": sweep, "cells": [*cells, *off]}

    def _median(self, source: str) -> float | None:
        """Of the first sweep that knows the point: predictions of one machine are all the same."""
        return next((median(times) for times in self.times.get(source, {}).values()), None)


def _iterations(tables: Path) -> Iterator[tuple[tuple[Any, ...], _Point, str, float]]:
    """What sets a point apart, the point, its source and each iteration that counts, in ms.

    A run of which no iteration is known has its own time.
    """
    try:
        study = study_from(read_json(tables / "study.json"), str(tables / "study.json"))
        runs, iterations = (_rows(tables / f"{name}.csv") for name in ("runs", "iterations"))
    except (ConfigError, OSError):
        return  # An older sweep, or one that is being written, has no numbers to show here.
    machine = read_json(tables.parent / SWEEP_FILE).get(SIMULATED)
    machine = machine.get("machine") if isinstance(machine, dict) else "an unknown machine"
    namer = Namer(study)
    shared = [name for name, row in study.fields.items() if not row.only_some_engines]
    times: dict[str, list[str]] = {}
    for row in iterations:
        if row.get("warmup") != "1":
            times.setdefault(row["path"], []).append(row["iteration_ms"])
    for row in runs:
        fields = {name: _value(row.get(name, "")) for name in (*_CORE, *study.fields)}
        known = {name: value for name, value in fields.items() if value is not None}
        settings = [known.get(name, study.all_fields[name].default) for name in (*_CORE, *shared)]
        point = {**known, "engine": row["engine"]}
        key = (study.name, *map(str, settings), namer.engine_key(point))
        for cell in times.get(row["path"]) or [row["iteration_median_ms"]]:
            if cell and row["status"] in ("", "ok"):
                source = row["source"] or MEASURED
                source = f"{SIMULATED} on {machine}" if source == SIMULATED else source
                yield key, _Point(study, point, {}), source, float(cell)


def _value(cell: str) -> float | str | None:
    try:
        return float(cell)
    except ValueError:
        return cell or None


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))
