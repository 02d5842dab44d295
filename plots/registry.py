"""The kinds of figures that a study may declare, and how each is drawn."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from matplotlib.figure import Figure

from configs.errors import explain
from configs.study import Figure as FigureRow, Study
from plots.bars import draw_breakdown, draw_models, draw_results
from plots.lines import draw_swept
from plots.scatter import draw_tradeoff
from plots.tables import PlotError, Tables
from plots.timelines import draw_loss, draw_memory, draw_utilisation

_PARAMETERS = ("x", "y", "label")
Draw = Callable[..., Figure]
"""Takes tables, the study's row of the figure, and ``asked``. A PlotError says that the tables hold
nothing of it or, unless it was asked for, nothing worth it."""

KINDS: dict[str, tuple[Draw, tuple[str, ...]]] = {
    "breakdown": (draw_breakdown, ()),
    "loss": (draw_loss, ()),
    "swept": (draw_swept, ("x", "y")),
    "models": (draw_models, ()),
    "memory": (draw_memory, ()),
    "results": (draw_results, ("y",)),
    "tradeoff": (draw_tradeoff, ("y",)),
    "utilisation": (draw_utilisation, ()),
}
"""How each kind is drawn, and the parameters that the study has to give; one with an ``x`` may have
a ``label`` of its axis."""


class Drawing(NamedTuple):
    """A figure of a study that can be asked for."""

    row: FigureRow
    kind: Draw

    def draw(self, tables: Tables, *, asked: bool = True) -> Figure:
        """Draw it; see :data:`Draw`."""
        return self.kind(tables, self.row, asked=asked)


def figures(study: Study) -> dict[str, Drawing]:
    """Return the figures of a study by their names, in its order.

    Raises:
        PlotError: the study declares a figure that no kind can draw.
    """
    found = {}
    for name, row in study.figures.items():
        where = f"study '{study.name}', figure '{name}'"
        if row.kind not in KINDS:
            raise PlotError(f"{where}: {explain.unknown('kind', row.kind, KINDS)}")
        draw, required = KINDS[row.kind]
        given = {parameter for parameter in _PARAMETERS if getattr(row, parameter)}
        taken = (*required, "label") if "x" in required else required
        if not given.issuperset(required):
            raise PlotError(f"{where}: kind '{row.kind}' needs {' and '.join(required)}")
        for parameter in sorted(given.difference(taken)):
            known = ", ".join(taken) or "no parameter"
            raise PlotError(
                f"{where}: {parameter} means nothing to kind '{row.kind}', which takes {known}"
            )
        found[name] = Drawing(row, draw)
    return found
