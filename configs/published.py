"""Values that others published: ``published.csv`` of a study, of its points or of whole runs."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from configs.errors import ConfigError, explain
from configs.schema import Point
from configs.study import Study, load_study
from configs.sweep import Sweep
from configs.table import Table

PUBLISHED_FILE = "published.csv"
_COLUMNS = ("sweep", "machine", "quantity", "value")
"""Beside them, columns are fields of the point that a value is of."""
_OF_WHOLE_RUNS = "label"
"""Column of a file whose values are of whole runs, no point's."""


class Published(Table):
    """One value of a file of published values, whose head explains the quantities."""

    sweep: str
    """Sweep whose figure it is of."""
    machine: str
    """Profile of the machine it was measured on."""
    fields: dict[str, Any]
    """Fields of its point, those that every published run had among them."""
    quantity: Literal["forward_s", "backward_s", "update_s", "iterations_99_s", "update_rate"]
    value: float = Field(gt=0)
    """In s, or in 1e9 parameters a second."""
    source: str
    """Where it was published."""

    def is_of(self, point: Point) -> bool:
        """Return whether a point was run as this value's run was."""
        return all(point.value(name) == value for name, value in self.fields.items())

    def column(self) -> str:
        """Return the name of the figure that it is a value of."""
        others = {"update_rate": "update_ms", "iterations_99_s": "iteration_ms"}
        return others.get(self.quantity, self.quantity.replace("_s", "_ms"))

    def milliseconds(self, model: str) -> float:
        """Return the time; a rate counts a model by its name, "7B" as 7e9."""
        if self.quantity == "update_rate":
            return 1000.0 * (float(model.rstrip("B")) / self.value)
        times = 99 if self.quantity == "iterations_99_s" else 1
        return 1000.0 * self.value / times


def read_published(study: Study) -> list[Published]:
    """Return all values that a study has of points; none where it has no such file.

    Raises:
        ConfigError: The file cannot be read; names it and the line.
    """
    path, columns, rows = _read_file(study)
    if study.published is None or _OF_WHOLE_RUNS in columns:
        return []
    found = []
    known = [*_COLUMNS, *study.point_type.model_fields, "accumulation"]
    if unknown := [name for name in columns if name not in known]:
        raise ConfigError(f"{path}: {explain.unknown('column', unknown[0], known)}")
    for row in rows:
        shown = f"{path}: {','.join(str(value) for value in row.values())!r}"
        table: dict[str, Any] = {name: row.pop(name) for name in _COLUMNS if name in row}
        table["fields"] = {**study.published.conditions, **{n: _read(row[n]) for n in row}}
        found.append(Published.read({**table, "source": study.published.source}, shown))
    return found


def published_runs(study: Study) -> dict[str, dict[str, float]]:
    """Return the values that a study has of whole runs: column of ``runs.csv``, label, value.

    Raises:
        ConfigError: The file is of another form.
    """
    path, columns, rows = _read_file(study)
    found: dict[str, dict[str, float]] = {}
    for row in rows if columns and "sweep" not in columns else ():
        try:
            found.setdefault(row["quantity"], {})[row["label"]] = float(row["value"])
        except (KeyError, TypeError, ValueError):
            raise ConfigError(
                f"{path}: {row}: give label, quantity and a value that is a number"
            ) from None
    return found


def _read_file(study: Study) -> tuple[Path, Sequence[str], list[dict[str, Any]]]:
    """Return the file of a study, its columns and rows; both are empty where there is none."""
    path = (study_folder(study) or Path("no folder")) / PUBLISHED_FILE
    if not path.is_file():
        return path, (), []
    lines = path.read_text(encoding="utf-8").splitlines()
    reader = csv.DictReader(line for line in lines if not line.startswith("#"))
    return path, reader.fieldnames or (), list(reader)


def study_folder(study: Study) -> Path | None:
    """Return the folder of the shipped study which a study that came with runs is, if any."""
    try:
        shipped = load_study(study.name)
    except ConfigError:
        return study.folder
    is_shipped = (shipped.title, shipped.source) == (study.title, study.source)
    return shipped.folder if is_shipped else study.folder


def _read(text: str | None) -> float | str:
    try:
        return float(text or "")
    except ValueError:
        return text or ""


def published_of(
    points: Sequence[Point], sweep: str, machine: str, every: Sequence[Published]
) -> dict[str, dict[str, float | str]]:
    """Return the published values of a sweep's points, by their names.

    Times are in ms: ``iteration_ms`` has what lies outside the phases too, and is left out where
    only the phases were published. A value of the sweep's own figure goes before one of another.
    """
    own = [value for value in every if value.machine == machine]
    own.sort(key=lambda value: value.sweep != sweep)
    found: dict[str, dict[str, float | str]] = {}
    for point in points:
        values: dict[str, Published] = {}
        for value in own:
            if value.is_of(point):
                values.setdefault(value.column(), value)
        if values:
            times = {name: value.milliseconds(point.model.name) for name, value in values.items()}
            found[point.name] = {**times, "about": next(iter(values.values())).source}
    return found


def as_published(sweep: Sweep, points: Sequence[Point], every: Sequence[Published]) -> list[Point]:
    """Return the points of a sweep of named models, with the fields that published runs had.

    A model's own default may be another: the paper's logs of 7B have subgroups of 100M elements
    wherever models are compared, and 10M in its run on one GPU. A sweep that says what it wants
    keeps it.
    """
    published, study = sweep.study.published, sweep.study
    if sweep.leaves_model_open or published is None:
        return list(points)
    given = {name for table in (sweep.point, sweep.grid, *sweep.engines) for name in table}
    own = {
        name: value
        for name, value in published.conditions.items()
        if name in study.fields and name not in given
    }
    models = {value.fields.get("model") for value in every}
    return [
        point.model_copy(update=own) if point.model.name in models else point for point in points
    ]
