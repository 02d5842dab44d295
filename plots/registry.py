"""The kinds of figures that a study may declare, and how each is drawn."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from matplotlib.figure import Figure

from configs.study import Figure as FigureRow, Study
from plots.bars import draw_breakdown, draw_models, draw_results
from plots.lines import draw_swept
from plots.scatter import draw_tradeoff
from plots.tables import Tables
from plots.timelines import draw_loss, draw_memory, draw_utilisation

Draw = Callable[..., Figure]
"""Takes tables, the study's row of the figure, and ``asked``. A PlotError says that the tables hold
nothing of it or, unless it was asked for, nothing worth it."""

KINDS: dict[str, Draw] = {
    "breakdown": draw_breakdown,
    "loss": draw_loss,
    "swept": draw_swept,
    "models": draw_models,
    "memory": draw_memory,
    "results": draw_results,
    "tradeoff": draw_tradeoff,
    "utilisation": draw_utilisation,
}


class Drawing(NamedTuple):
    """A figure of a study that can be asked for."""

    row: FigureRow
    kind: Draw

    def draw(self, tables: Tables, *, asked: bool = True) -> Figure:
        """Draw it; see :data:`Draw`."""
        return self.kind(tables, self.row, asked=asked)


def figures(study: Study) -> dict[str, Drawing]:
    """Return the figures of a study by their names, in its order."""
    return {name: Drawing(row, KINDS[row.kind]) for name, row in study.figures.items()}
