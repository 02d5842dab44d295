"""Values that others published of points that a sweep has: ``published.csv`` of a study."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from configs.errors import ConfigError, explain
from configs.fields import field_row
from configs.schema import Point
from configs.study import Study
from configs.sweep import Sweep
from configs.table import Table

FILE = "published.csv"
_COLUMNS = ("sweep", "machine", "quantity", "value")
"""Beside them, columns are fields of the point that a value is of."""
_OF_WHOLE_RUNS = "label"
"""Column of a file whose values are of whole runs, no point's: ``plots.results`` draws them."""
_PHASES = ("forward_s", "backward_s", "update_s")


class Published(Table):
    """One value."""

    sweep: str
    """Sweep whose figure it is of."""
    machine: str
    """Profile of the machine it was measured on."""
    fields: dict[str, Any]
    """Fields of its point as text, those that every published run had among them."""
    quantity: Literal["forward_s", "backward_s", "update_s", "iterations_99_s", "update_rate"]
    """See the file's head."""
    value: float = Field(gt=0)
    """In s, or in 1e9 parameters a second."""
    source: str
    """Where it was published."""

    def is_of(self, point: Point) -> bool:
        """Whether a point was run as this value's run was."""
        return all(_is_equal(point.value(name), value) for name, value in self.fields.items())


def _is_equal(value: object, published: object) -> bool:
    """Text of a file is held against a number as a number."""
    if isinstance(published, str) and isinstance(value, int | float):
        return float(value) == float(published)
    return value == published


def read_published(study: Study) -> list[Published]:
    """All values that a study has of points; none where it has no such file.

    Raises:
        ConfigError: The file cannot be read; names it and the line.
    """
    path = (study.folder or Path()) / FILE
    if study.folder is None or study.published is None or not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    rows = csv.DictReader(line for line in lines if not line.startswith("#"))
    if _OF_WHOLE_RUNS in (rows.fieldnames or ()):
        return []
    known = [*_COLUMNS, *study.point_type.model_fields, "accumulation"]
    for name in rows.fieldnames or ():
        if name not in known:
            raise ConfigError(f"{path}: {explain.unknown('column', name, known)}")
    return [_read_row(row, path, study) for row in rows]


def _read_row(row: Mapping[str, str], path: Path, study: Study) -> Published:
    assert study.published is not None
    fields = {name: text for name, text in row.items() if name not in _COLUMNS}
    shown = f"{path}: {','.join(str(value) for value in row.values())!r}"
    for name, text in fields.items():
        if field_row(study.all_fields, name).type in ("int", "float"):
            try:
                float(text)
            except (TypeError, ValueError):
                raise ConfigError(f"{shown}: {name} = {text!r} is no number") from None
    table = {name: text for name, text in row.items() if name in _COLUMNS}
    more = {"fields": {**study.published.conditions, **fields}, "source": study.published.source}
    return Published.read({**table, **more}, shown)


def published_of(
    points: Sequence[Point], sweep: str, machine: str, every: Sequence[Published]
) -> dict[str, dict[str, float | str]]:
    """Published values of a sweep's points, by their names.

    Times are in ms: ``iteration_ms`` has what lies outside the phases too, and is left out where
    only the phases were published. A value of the sweep's own figure goes before one of another.

    Args:
        points: Named.
        sweep: Name of the sweep.
        machine: Name of the profile.
        every: What there is.
    """
    own = [value for value in every if value.machine == machine]
    own.sort(key=lambda value: value.sweep != sweep)
    found: dict[str, dict[str, float | str]] = {}
    for point in points:
        values: dict[str, Published] = {}
        for value in own:
            if value.is_of(point):
                values.setdefault(value.quantity, value)
        fields = _fields(values, point)
        if fields:
            found[point.name] = {**fields, "about": next(iter(values.values())).source}
    return found


def as_published(sweep: Sweep, points: Sequence[Point], every: Sequence[Published]) -> list[Point]:
    """The points of a sweep of named models, with the study's fields that published runs had.

    A model's own default may be another: the paper's logs of 7B have subgroups of 100M elements
    wherever models are compared, and 10M in its run on one GPU. A sweep that says what it wants
    keeps it.

    Args:
        sweep: What the points are of.
        points: Its points.
        every: What was published.
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


def _fields(values: Mapping[str, Published], point: Point) -> dict[str, float | str]:
    times = {name: values[name].value for name in _PHASES if name in values}
    if "update_rate" in values and (
        "update_s" not in times or values["update_rate"].sweep != values["update_s"].sweep
    ):
        # The rate counts the model by its name, "7B" as 7e9; the time is what was measured.
        named = float(point.model.name.rstrip("B"))
        times["update_s"] = named / values["update_rate"].value
    fields: dict[str, float | str] = {
        name.replace("_s", "_ms"): 1000.0 * seconds for name, seconds in times.items()
    }
    if "iterations_99_s" in values:
        fields["iteration_ms"] = 1000.0 * values["iterations_99_s"].value / 99
    return fields
