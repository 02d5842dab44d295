"""What makes two runs the same: the point with its data, and what it was run with."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from configs.schema import Model, Point
from configs.study import default_study
from launch.ds_json import patches

_KEY_CHARACTERS = 16
SETUP = ("code", "versions", "gpus", "cpu")
"""Parts of the provenance that can change a run's times or results."""
_SHOWN_FILES = 3
_LATER_FIELDS = frozenset(
    {
        *("architecture", "dtype", "pp", "zero_stage", "offload_optimizer", "offload_param"),
        *("eval_interval", "eval_iterations", "save_interval", "link_mbit"),
    }
)
"""Fields that points got after keys of theirs were written down. With its default such a field is
no part of the key, so that runs made before it still count."""


def point_key(point: Point, data: Mapping[str, Any]) -> str:
    """Key of a point's settings and data; the name is none of them, nor where the data lies.

    Args:
        point: The point.
        data: As :func:`data_facts` gives it.
    """
    return f"{settings_key(point)}-{_digest(data)}"


def settings_key(point: Point) -> str:
    """The part of :func:`point_key` that can be told before the data is there."""
    later = {
        name
        for name, row in (point.study.fields.items() if point.study else ())
        if row.added_later and point.value(name) == row.default
    }
    settings = point.model_dump(mode="json", exclude={"name", "data_prefix", *later})
    settings["model"] = _as_before(settings["model"], Model)
    return _digest({**_as_before(settings, Point), **_of_study(point)})


def _of_study(point: Point) -> dict[str, Any]:
    """What the study makes of the fields.

    Not for the default study: keys of its runs are older than studies, and what it makes of the
    fields is a part of :func:`setup_key` too.
    """
    study = point.study
    if study is None or study is default_study():
        return {}
    made: dict[str, Any] = {
        "patches": patches(point),
        "environment": point.row_environment,
        "companions": [
            row.model_dump() for row in study.companions.values() if point.value(row.field)
        ],
    }
    return {"study": made}


def _as_before(table: dict[str, Any], schema: type[Model] | type[Point]) -> dict[str, Any]:
    defaults = {name: schema.model_fields[name].default for name in _LATER_FIELDS & table.keys()}
    return {
        name: value
        for name, value in table.items()
        if name not in defaults or value != defaults[name]
    }


def setup_key(provenance: Mapping[str, Any]) -> str:
    """Key of what a run was run with: code, versions, processors."""
    return _digest([provenance.get(part) for part in SETUP])


def code_facts(files: Mapping[str, str], settings: object) -> dict[str, Any]:
    """The part ``code`` of the provenance.

    Args:
        files: As :func:`launch.records.code.code_of` gives them.
        settings: What else the checkout makes of a point: DeepSpeed's JSON, words, variables.
    """
    return {"sha256": _digest(files), "settings": _digest(settings), "files": dict(files)}


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """In what a run's setup differs from today's: ``code changed: launch/trainer/loop.py``.

    Args:
        before: The parts :data:`SETUP` of a run's provenance.
        now: Those that it would have now.
    """
    found = []
    if before.get("code") is None:
        found.append("made before the code of a run was noted file by file")
    else:
        code = [part.get("code") or {} for part in (before, now)]
        paths = _differing(*(part.get("files") or {} for part in code))
        more = f" and {len(paths) - _SHOWN_FILES} more" if len(paths) > _SHOWN_FILES else ""
        if paths:
            found.append(f"code changed: {', '.join(paths[:_SHOWN_FILES])}{more}")
        elif code[0].get("settings") != code[1].get("settings"):
            found.append("DeepSpeed's JSON, arguments or variables changed")
    old, new = (dict(part.get("versions") or {}) for part in (before, now))
    found += [f"{name} was {old.get(name)}, is {new.get(name)}" for name in _differing(old, new)]
    for part, word in (("gpus", "GPUs"), ("cpu", "processor")):
        if before.get(part) != now.get(part):
            found.append(f"{word} changed")
    return "; ".join(found)


def _differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    return [key for key in sorted({*before, *now}) if before.get(key) != now.get(key)]


def data_facts(prefix: str) -> dict[str, dict[str, Any]]:
    """Size and SHA-256 of Megatron's two files, by their endings.

    Raises:
        OSError: a file cannot be read.
    """
    return {end: _file_facts(Path(prefix + end)) for end in (".bin", ".idx")}


def _file_facts(path: Path) -> dict[str, Any]:
    stat = path.stat()
    return {"bytes": stat.st_size, "sha256": _file_digest(path, stat.st_size, stat.st_mtime_ns)}


@functools.cache
def _file_digest(path: Path, size: int, mtime_ns: int) -> str:
    """Read once while size and time of change stay; a corpus can have many GB."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest(value: object) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:_KEY_CHARACTERS]
