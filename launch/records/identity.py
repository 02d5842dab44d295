"""What makes two runs the same: the point with its data, and what it was run with.

The code of a run is the files of the checkout that its programs import. Nothing else of the
checkout can change what a run does, so nothing else makes a result an old one.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import deep_optimizer_states
from configs.files import ROOT
from configs.schema import Point
from launch.ds_json import patches

SETUP = ("code", "versions", "gpus", "cpu")
"""Parts of the provenance that can change a run's times or results."""
_KEY_CHARACTERS = 16
_SHOWN_FILES = 3
_SOURCE = ROOT / "src" / deep_optimizer_states.__name__
PLUGIN = _SOURCE if _SOURCE.is_dir() else Path(deep_optimizer_states.__file__).parent
"""The plugin's package: the checkout's, which ranks import first, or where it was installed."""


def point_key(point: Point, data: Mapping[str, Any]) -> str:
    """Return the key of a point's settings and :func:`data_facts`; its name is none of them."""
    return f"{settings_key(point)}-{_digest(data)}"


def settings_key(point: Point) -> str:
    """Return the part of :func:`point_key` that can be told before the data is there."""
    settings = point.model_dump(mode="json", exclude={"name", "data_prefix"})
    if point.study is not None:
        rows = point.study.companions.values()
        settings["study"] = {
            "patches": patches(point),
            "environment": point.row_environment,
            "companions": [row.model_dump() for row in rows if point.value(row.field)],
        }
    return _digest(settings)


def setup_key(provenance: Mapping[str, Any]) -> str:
    """Return the key of what a run was run with: code, versions, processors."""
    return _digest([provenance.get(part) for part in SETUP])


def code_facts(files: Mapping[str, str], settings: object) -> dict[str, Any]:
    """Return the part ``code`` of the provenance, of files and what they make of a point."""
    return {"sha256": _digest(files), "settings": _digest(settings), "files": dict(files)}


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Say in what a run's :data:`SETUP` differs from today's: ``code changed: launch/cli.py``."""
    found = []
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
    """Return size and SHA-256 of Megatron's two files, by their endings.

    Raises:
        OSError: a file cannot be read.
    """
    found = {}
    for end in (".bin", ".idx"):
        path = Path(prefix + end)
        stat = path.stat()
        digest = _file_digest(path, stat.st_size, stat.st_mtime_ns)
        found[end] = {"bytes": stat.st_size, "sha256": digest}
    return found


@functools.cache
def _file_digest(path: Path, size: int, mtime_ns: int) -> str:
    """Read once while size and time of change stay; a corpus can have many GB."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest(value: object) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:_KEY_CHARACTERS]


def code_of(entries: Iterable[str]) -> dict[str, str]:
    """Hash the files that programs execute, by their paths in the checkout.

    Programs are modules or paths of scripts; those that are not the checkout's are left out.
    Imports within functions count. Files of the plugin that are no Python (kernels, models) count
    where any of the plugin does.
    """
    found: set[Path] = set()
    for entry in entries:
        script = Path(entry)
        first = [script] if script.is_file() else _files_of(entry)
        waiting = [path for path in first if path.is_relative_to(ROOT)]
        while waiting:
            path = waiting.pop()
            if path not in found:
                found.add(path)
                waiting.extend(_imported(path))
    if any(path.is_relative_to(PLUGIN) for path in found):
        every = (path for path in PLUGIN.rglob("*") if path.is_file())
        found |= {path for path in every if path.suffix not in (".py", ".pyc")}
    return {_name(path): _hash(path) for path in sorted(found)}


_parsing = threading.Lock()


@functools.cache
def _imported(path: Path) -> tuple[Path, ...]:
    """Files of ours that a Python file imports, anywhere in it."""
    try:
        # Python 3.11 raises SystemError where two threads parse at once.
        with _parsing:
            tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError):
        return ()
    modules = {name for node in ast.walk(tree) for name in _names(node)}
    return tuple(file for name in sorted(modules) for file in _files_of(name))


def _names(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        yield node.module
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


@functools.cache
def _files_of(module: str) -> tuple[Path, ...]:
    """Files of ours that importing a module executes: its packages' and its own."""
    found, parts = [], module.split(".")
    sources = ROOT / "src"
    root = sources if (sources / parts[0]).is_dir() else ROOT
    root = PLUGIN.parent if parts[0] == PLUGIN.name else root
    for end in range(1, len(parts) + 1):
        place = root.joinpath(*parts[:end])
        found += [place / "__init__.py", place.with_suffix(".py")]
    return tuple(path for path in found if path.is_file())


def _name(path: Path) -> str:
    return path.relative_to(ROOT if path.is_relative_to(ROOT) else PLUGIN.parent).as_posix()


@functools.cache
def _hash(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:_KEY_CHARACTERS]
    except OSError:
        return "unreadable"
