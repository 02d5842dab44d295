"""What each release of DeepSpeed reads from its configuration: ``releases.json``, and its making.

``python -m ds_config.releases FOLDER...`` reads unpacked releases, folders named
``deepspeed-VERSION``, and writes the file anew.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from packaging.version import Version

from ds_config.expressions import Key, KeyFact
from ds_config.source import read_keys

FILE = Path(__file__).with_name("releases.json")
_UNSAID = asdict(KeyFact())


@functools.cache
def _table() -> dict[str, Any]:
    table: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return table


def versions() -> list[str]:
    """Releases that are on file, the oldest first."""
    found: list[str] = _table()["versions"]
    return found


def keys_of(version: str) -> dict[Key, KeyFact]:
    """What a release on file reads.

    Raises:
        LookupError: it is not on file.
    """
    if version not in versions():
        raise LookupError(version)
    at = versions().index(version)
    found = {}
    for name, changes in _table()["keys"].items():
        facts = next((fact for since, fact in reversed(changes) if since <= at), None)
        if facts is not None:
            found[tuple(name.split("."))] = KeyFact(**facts)
    return found


def history(key: Key) -> list[tuple[str, KeyFact | None]]:
    """Releases in which a key came, changed or went (None), the oldest first."""
    changes = _table()["keys"].get(".".join(key), [])
    return [(versions()[at], None if fact is None else KeyFact(**fact)) for at, fact in changes]


def write(folders: list[Path], file: Path = FILE) -> None:
    """Write the file from unpacked releases."""
    by_version = {folder.name.removeprefix("deepspeed-"): folder for folder in folders}
    names = sorted(by_version, key=Version)
    changes: dict[str, list[tuple[int, dict[str, Any] | None]]] = {}
    for at, version in enumerate(names):
        keys = read_keys(by_version[version] / "deepspeed")
        facts = {".".join(key): _said(fact) for key, fact in keys.items()}
        for name in {**changes, **facts}:
            known = changes.setdefault(name, [])
            if facts.get(name) != (known[-1][1] if known else None):
                known.append((at, facts.get(name)))
    lines = ",\n".join(
        f"{json.dumps(name)}: {json.dumps(changes[name])}" for name in sorted(changes)
    )
    file.write_text(
        f'{{"versions": {json.dumps(names)},\n"keys": {{\n{lines}\n}}}}\n', encoding="utf-8"
    )


def _said(fact: KeyFact) -> dict[str, Any]:
    return {name: value for name, value in asdict(fact).items() if value != _UNSAID[name]}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m ds_config.releases", description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path, help="unpacked releases")
    write(parser.parse_args().folders)
    sys.stdout.write(f"{FILE.name}: {len(versions())} releases\n")
