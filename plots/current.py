"""Which figures are as their tables and our style have them; loads nothing that draws."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

from configs.files import ROOT, read_given_json, read_json, write_json
from configs.study import Study, default_study, study_from

RUNS_FILE = "runs.csv"
"""Of the tables, the one that there always is."""
STUDY_FILE = "study.json"
"""Beside the tables: the study that declares their fields, engines, phases and figures."""
FORMATS = ("png", "pdf", "svg")
RECORD = ".drawn.json"
"""Beside the figures: of what each was made, and why others were not drawn."""
_STYLE = ("plots/*.py", "plots/*.mplstyle", "configs/*.py")
_LIBRARIES = ("matplotlib", "numpy", "pandas")


def study_of(folder: Path) -> Study:
    """Return the study that lies beside tables, or the default one where none does.

    Raises:
        ConfigError: the file is no study.
    """
    path = folder / STUDY_FILE
    return study_from(read_given_json(path), str(path)) if path.exists() else default_study()


def digest_of(tables: Path) -> str:
    """Return a digest of all that figures are made of: tables, study, our code and libraries."""
    style = (path for pattern in _STYLE for path in ROOT.glob(pattern))
    digest = hashlib.sha256()
    for path in (*sorted(tables.glob("*.csv")), tables / STUDY_FILE, *sorted(style)):
        if path.is_file():
            digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
            digest.update(path.read_bytes())
    digest.update(repr([metadata.version(name) for name in _LIBRARIES]).encode())
    return digest.hexdigest()


class Drawn:
    """What was drawn into a folder, and from what.

    Args:
        out: Folder of figures.
        tables: What they are now made of.
    """

    def __init__(self, out: Path, tables: Path) -> None:
        self._out = out
        self._digest = digest_of(tables)
        known = read_json(out / RECORD)
        self._rows: dict[str, Any] = {k: v for k, v in known.items() if isinstance(v, dict)}

    def current(self, names: Iterable[str]) -> dict[str, str]:
        """Return the figures that need not be drawn, and why they were not; empty if they were."""
        found = {}
        for name in names:
            row = self._rows.get(name, {})
            why = str(row.get("why", ""))
            files = [self._out / f"{name}.{kind}" for kind in FORMATS]
            if row.get("of") == self._digest and (why or all(path.is_file() for path in files)):
                found[name] = why
        return found

    def forget(self, names: Iterable[str]) -> None:
        """Record, before they are written, that figures are not known to be current."""
        if known := self._rows.keys() & set(names):
            self._rows = {name: row for name, row in self._rows.items() if name not in known}
            self._write()

    def remember(self, results: dict[str, str]) -> None:
        """Record figures that were drawn, and why others were not."""
        self._rows |= {name: {"of": self._digest, "why": why} for name, why in results.items()}
        self._write()

    def _write(self) -> None:
        with contextlib.suppress(OSError):  # without it they are drawn again
            write_json(self._out / RECORD, self._rows)
