"""Values that others published of points that a sweep has: ``configs/published/*.csv``."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from configs.errors import ConfigError
from configs.schema import CONFIGS_DIR, Point
from configs.sweep import Sweep

PUBLISHED_DIR = CONFIGS_DIR / "published"
SOURCES = {"middleware24": "DOI 10.1145/3652892.3700781 and the authors' artifact"}
"""By file; other files go by their names."""
_COLUMNS = (
    *("sweep", "machine", "model", "engine", "stride", "offload_ratio"),
    *("quantity", "value"),
)
_PHASES = ("forward_s", "backward_s", "update_s")
_QUANTITIES = (*_PHASES, "iterations_99_s", "update_rate")
_DP, _SUBGROUP_NUMEL = 4, 100_000_000
"""Of every published run; all have one micro-batch of one sample."""


@dataclass(frozen=True)
class Published:
    """One value.

    Attributes:
        sweep: Sweep whose figure it is of.
        machine: Profile of the machine it was measured on.
        point: Model, engine, stride and offload ratio.
        quantity: ``forward_s``, ``backward_s``, ``update_s``, ``iterations_99_s`` or
            ``update_rate``; see the file's head.
        value: In s, or in 1e9 parameters a second.
        source: Where it was published.
    """

    sweep: str
    machine: str
    point: tuple[str, str, int, float]
    quantity: str
    value: float
    source: str


def read_published(folder: Path = PUBLISHED_DIR) -> list[Published]:
    """All values of a folder.

    Raises:
        ConfigError: A file cannot be read; names it and the line.
    """
    found = []
    for path in sorted(folder.glob("*.csv")):
        text = path.read_text(encoding="utf-8")
        lines = [line for line in text.splitlines() if not line.startswith("#")]
        for row in csv.DictReader(lines):
            found.append(_read_row(row, path))
    return found


def _read_row(row: Mapping[str, str], path: Path) -> Published:
    try:
        point = (row["model"], row["engine"], int(row["stride"]), float(row["offload_ratio"]))
        value, quantity = float(row["value"]), row["quantity"]
        if quantity not in _QUANTITIES or not value > 0:
            raise ValueError
    except (KeyError, TypeError, ValueError):
        shown = ",".join(str(value) for value in row.values())
        raise ConfigError(
            f"{path}: {shown!r}: give {', '.join(_COLUMNS)}, with a value above 0 and a quantity "
            f"of {', '.join(_QUANTITIES)}"
        ) from None
    source = SOURCES.get(path.stem, path.stem)
    return Published(row["sweep"], row["machine"], point, quantity, value, source)


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
    for point in filter(_is_as_published, points):
        values: dict[str, Published] = {}
        for value in own:
            if value.point == _identity(point):
                values.setdefault(value.quantity, value)
        fields = _fields(values, point)
        if fields:
            found[point.name] = {**fields, "about": next(iter(values.values())).source}
    return found


def with_published_subgroups(
    sweep: Sweep, points: Sequence[Point], every: Sequence[Published]
) -> list[Point]:
    """The points of a sweep of named models, with the subgroups that their published runs had.

    The paper's logs of 7B have subgroups of 100M elements wherever models are compared; 10M, the
    model's own, is that of its run on one GPU. A sweep that says what it wants keeps it.

    Args:
        sweep: What the points are of.
        points: Its points.
        every: What was published.
    """
    tables = (sweep.point, sweep.grid, *sweep.engines)
    if sweep.leaves_model_open or any("subgroup_numel" in table for table in tables):
        return list(points)
    models = {value.point[0] for value in every}
    return [
        point.model_copy(update={"subgroup_numel": _SUBGROUP_NUMEL})
        if point.model.name in models
        else point
        for point in points
    ]


def _identity(point: Point) -> tuple[str, str, int, float]:
    return point.model.name, point.engine.value, point.stride, point.offload_ratio


def _is_as_published(point: Point) -> bool:
    """Whether a point was run as the published ones were."""
    return (
        (point.dp, point.tp, point.micro_batch_size, point.accumulation) == (_DP, 1, 1, 1)
        and (point.subgroup_numel, point.hog_share) == (_SUBGROUP_NUMEL, 0)
        and point.activation_checkpointing
    )


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
