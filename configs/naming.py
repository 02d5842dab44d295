"""Short names of points: the model, what varies among them, the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from configs.schema import Engine, Model, Point

_SHORT = {
    "micro_batch_size": "micro-batch",
    "subgroup_numel": "subgroup",
    "offload_ratio": "ratio",
    "hog_share": "hog",
}
_UNNAMED = {"name", "model", "engine", "stride", "global_batch_size"}
"""Fields that the name says otherwise, or that others determine."""


def name_points(points: Sequence[Point]) -> list[Point]:
    """The points with a name each, unless they have one; no two names are equal.

    ``tiny vanilla``, ``7B subgroup 10M hybrid stride 2``.
    """
    varying = [key for key in _keys() if _varies(points, key)]
    names: dict[str, int] = {}
    result = []
    for point in points:
        name = point.name or " ".join(
            [
                point.model.name,
                *(f"{_SHORT.get(key, key)} {_text(_value(point, key))}" for key in varying),
                engine_words(point),
            ]
        )
        names[name] = names.get(name, 0) + 1
        unique = name if names[name] == 1 else f"{name} #{names[name]}"
        result.append(point.model_copy(update={"name": unique}))
    return result


def engine_words(point: Point) -> str:
    """``vanilla``, ``hybrid stride 2``."""
    stride = f" stride {point.stride}" if point.engine is Engine.HYBRID else ""
    return f"{point.engine.value}{stride}"


def _keys() -> list[str]:
    of_point = [name for name in Point.model_fields if name not in _UNNAMED]
    of_model = [f"model.{name}" for name in Model.model_fields if name != "name"]
    return ["accumulation", *of_point, *of_model]


def _varies(points: Sequence[Point], key: str) -> bool:
    """Whether points of one model differ in the field; models differ in their names already."""
    pairs = {(point.model.name, str(_value(point, key))) for point in points}
    return len(pairs) > len({point.model.name for point in points})


def _value(point: Point, key: str) -> Any:  # noqa: ANN401 - any field of a point
    if key.startswith("model."):
        return getattr(point.model, key.removeprefix("model."))
    return getattr(point, key)


def _text(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    for size, letter in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if isinstance(value, int) and value >= size and value % (size // 10) == 0:
            return f"{value / size:g}{letter}"
    return f"{value:g}"
