"""What every benchmark shows: a table, and the same as JSON in a new file."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from deep_optimizer_states.cores import cpu_facts

NONE = "-"
"""Stands for a figure that was not measured."""


class BenchmarkError(ValueError):
    """The command cannot do what it was asked."""


def as_table(head: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> str:
    """Rows under their heads; the columns ``left`` to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = []
    for row in (head, *rows):
        cells = enumerate(zip(row, widths, strict=True))
        aligned = (c.ljust(w) if idx in left else c.rjust(w) for idx, (c, w) in cells)
        lines.append("  ".join(aligned).rstrip())
    return "\n".join(lines)


def shown(value: float | None, digits: int = 2, unit: str = "") -> str:
    """A figure for a table."""
    return NONE if value is None else f"{value:.{digits}f}{unit}"


def check_output(path: Path | None) -> None:
    """Refuse a file that is there, before anything is measured.

    Raises:
        BenchmarkError: It is there, or its folder is not.
    """
    if path is None:
        return
    if path.exists():
        raise BenchmarkError(f"--json {path}: already there; give a new name")
    if not path.parent.is_dir():
        raise BenchmarkError(f"--json {path}: there is no folder {path.parent}")


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a new file.

    Raises:
        BenchmarkError: It appeared in the meantime.
    """
    try:
        with path.open("x", encoding="utf-8") as file:
            json.dump(content, file, indent=2, allow_nan=False)
            file.write("\n")
    except FileExistsError:
        raise BenchmarkError(f"--json {path}: already there; give a new name") from None


def machine_facts() -> dict[str, Any]:
    """What decides the figures: processor, memory and versions."""
    return {
        "processor": cpu_facts("model name") or platform.machine(),
        "cores": psutil.cpu_count(logical=False) or psutil.cpu_count(),
        "usable_cpus": len(psutil.Process().cpu_affinity()),
        "memory_bytes": psutil.virtual_memory().total,
        "load": psutil.getloadavg()[0],
        "python": platform.python_version(),
        "versions": {name: metadata.version(name) for name in ("torch", "deepspeed")},
    }
