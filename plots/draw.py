"""Draws the figures of a study from tables and writes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import matplotlib as mpl

from configs.cli import complain, say
from plots.canvas import save
from plots.registry import figures
from plots.tables import PlotError, Tables


@dataclass
class Results:
    """What became of figures, by their names."""

    drawn: list[str] = field(default_factory=list)
    unwritten: list[str] = field(default_factory=list)
    impossible: dict[str, str] = field(default_factory=dict)
    """Why the tables do not give them."""


def draw(tables: Tables, names: Sequence[str], out: Path, *, asked: bool) -> Results:
    """Draw figures of the tables' study, and say of each where it is.

    Args:
        tables: What they show.
        names: Figures to draw.
        out: Folder to write into.
        asked: Whether to draw what the tables have little to show for as well.
    """
    mpl.use("agg")
    known, results = figures(tables.study), Results()
    for name in names:
        try:
            made = known[name].draw(tables, asked=asked)
        except PlotError as error:
            results.impossible[name] = str(error)
            continue
        try:
            files = save(made, out, name, known[name].row.title)
        except PlotError as error:
            complain(f"plots: error: {error}")
            results.unwritten.append(name)
            continue
        say(f"{files[0]} (and {', '.join(path.suffix for path in files[1:])})")
        results.drawn.append(name)
    return results
