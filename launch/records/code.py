"""The code that a run executes: files of the checkout that its programs import, and their hashes.

Nothing else of the checkout can change what a run does, so nothing else makes a result an old one.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import deep_optimizer_states
from configs.files import ROOT

_SOURCE = ROOT / "src" / deep_optimizer_states.__name__
PLUGIN = _SOURCE if _SOURCE.is_dir() else Path(deep_optimizer_states.__file__).parent
"""The plugin's package: the checkout's, which ranks import first, or where it was installed."""
_HASH_CHARACTERS = 16


def code_of(entries: Iterable[str]) -> dict[str, str]:
    """Hash the files that programs execute, by their paths in the checkout.

    Imports within functions count. Files of the plugin that are no Python (kernels, models) count
    where any of the plugin does.

    Args:
        entries: modules, or paths of scripts; those that are not the checkout's are left out.
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
        return hashlib.sha256(path.read_bytes()).hexdigest()[:_HASH_CHARACTERS]
    except OSError:
        return "unreadable"
