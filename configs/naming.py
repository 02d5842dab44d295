"""The one namer of points, for terminal, tables and legends: model, what varies, engine.

Points are plain mappings of their fields, as ``run.json`` has them or as a log's name gives some of
them, so that whoever reads results names them as whoever ran them did.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from configs.fields import field_row
from configs.schema import Point
from configs.study import Study

UNKNOWN_ENGINE = "unknown engine"
_UNNAMED = frozenset(
    {"name", "model", "engine", "global_batch_size", "num_ranks", "data_prefix", "split"}
)
"""Fields that the name says otherwise, or that others determine."""
_TOLD_AS = {"global_batch_size": "accumulation"}
"""Unnamed fields, to the one that changes with them."""
_WHERE = frozenset({"device"})
"""Fields that say where, not what: named where points differ in them, whoever set them."""

Fields = Mapping[str, Any]
"""Fields of a point by their names, ``model.NAME`` for those of its model; unknown ones are absent
or None."""


@dataclass(frozen=True)
class Namer:
    """Names points of a study."""

    study: Study

    def engine(self, point: Fields) -> str:
        """Return ``stock``, ``stride 2``: the engine and fields that it alone takes."""
        engine = str(point.get("engine") or UNKNOWN_ENGINE)
        names = self._set_fields(point)
        settings = [self.setting(name, point[name]) for name in names]
        # An engine that is called as its own field is not named twice.
        return " ".join(settings if engine in names else [engine, *settings])

    def engine_key(self, point: Fields) -> tuple[Any, ...]:
        """Return what tells an engine with its fields from others, sorted as figures show them."""
        name, names = str(point.get("engine")), list(self.study.engines)
        place = names.index(name) if name in names else len(names)
        set_here = self._set_fields(point)
        # Set or not comes first: a switch that is off and on by default is not at its default.
        values = tuple(
            (key in set_here, point[key] if key in set_here else None)
            for key in self._own_fields(point)
        )
        return place, name, values

    def setting(self, name: str, value: object) -> str:
        """Return a field and its value: ``micro-batch 4``."""
        return field_row(self.study.all_fields, name).words(value)

    def varying(self, points: Sequence[Fields], told: Collection[str] = ()) -> list[str]:
        """Return the fields in which points of one model differ, those of engines aside.

        Those of ``told``, which a command set in place of a sweep's own, are among them.
        """
        keys = dict.fromkeys([*self.study.all_fields, *(key for point in points for key in point)])
        own = {name for name, row in self.study.fields.items() if row.only_some_engines}
        left_out = _UNNAMED | own | {*self.study.set_by_engines}
        told = {_TOLD_AS.get(name, name) for name in told} - _WHERE
        found = [key for key in keys if key not in left_out]
        return [key for key in found if key in told or _varies(points, key)]

    def case(self, point: Fields, varying: Sequence[str]) -> str:
        """Return the model and what varies: ``7B, subgroup 10M``."""
        return ", ".join(self._case_parts(point, varying))

    def name(self, point: Fields, varying: Sequence[str]) -> str:
        """Return a point's name: ``7B subgroup 10M stride 2``."""
        return " ".join([*self._case_parts(point, varying), self.engine(point)])

    def _case_parts(self, point: Fields, varying: Sequence[str]) -> list[str]:
        model = point.get("model") or point.get("model.name")
        values = {key: point[key] for key in varying if point.get(key) is not None}
        settings = [self.setting(key, value) for key, value in values.items()]
        return [*([] if model is None else [str(model)]), *settings]

    def _own_fields(self, point: Fields) -> list[str]:
        row = self.study.engines.get(str(point.get("engine")))
        fields = self.study.fields.items()
        return [name for name, f in fields if f.only_some_engines and row and name in row.fields]

    def _set_fields(self, point: Fields) -> list[str]:
        """Return the fields that the point's engine alone takes, where not at their default."""
        return [
            name
            for name in self._own_fields(point)
            if not _is_missing(point.get(name)) and point[name] != self.study.fields[name].default
        ]


def flat(point: Point) -> dict[str, Any]:
    """Return a point's fields as :data:`Fields`."""
    of_model = {f"model.{name}": value for name, value in point.model if name != "name"}
    return {**point.values, "model": point.model.name, **of_model}


def name_points(points: Sequence[Point], study: Study, told: Collection[str] = ()) -> list[Point]:
    """Return the points with a name each, unless they have one; no two names are equal.

    Names tell the fields that vary, and those of ``told``.
    """
    namer, seen, named = Namer(study), Counter[str](), []
    fields = [flat(point) for point in points]
    varying = namer.varying(fields, told)
    for point, one in zip(points, fields, strict=True):
        name = point.name or namer.name(one, varying)
        seen[name] += 1
        name = name if seen[name] == 1 else f"{name} #{seen[name]}"
        named.append(point.model_copy(update={"name": name}))
    return named


def _varies(points: Sequence[Fields], key: str) -> bool:
    # Models differ in their names already.
    pairs = {(str(point.get("model")), str(point.get(key))) for point in points}
    return len(pairs) > len({str(point.get("model")) for point in points})


def _is_missing(value: object) -> bool:
    return value is None or value == "" or value != value  # not a number is not equal to itself
