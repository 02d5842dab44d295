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


class Kind(NamedTuple):
    """One way to draw."""

    draw: Callable[..., list[Figure]]
    """Takes tables, the study's row of the figure, and ``asked``; returns pages. A PlotError says
    that the tables hold nothing of it or, unless it was asked for, nothing worth it."""
    required: tuple[str, ...] = ()
    """Parameters that the study has to give."""
    optional: tuple[str, ...] = ()


class Drawing(NamedTuple):
    """A figure of a study that can be asked for."""

    row: FigureRow
    kind: Kind

    def draw(self, tables: Tables, *, asked: bool = True) -> list[Figure]:
        """Draw its pages; see :class:`Kind`."""
        return self.kind.draw(tables, self.row, asked=asked)


KINDS = {
    "breakdown": Kind(draw_breakdown),
    "loss": Kind(draw_loss),
    "swept": Kind(draw_swept, ("x", "y"), ("label",)),
    "models": Kind(draw_models),
    "memory": Kind(draw_memory),
    "results": Kind(draw_results, ("y",)),
    "tradeoff": Kind(draw_tradeoff, ("y",)),
    "utilisation": Kind(draw_utilisation),
}


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
        kind = KINDS[row.kind]
        given = {parameter for parameter in _PARAMETERS if getattr(row, parameter)}
        taken = (*kind.required, *kind.optional)
        if not given.issuperset(kind.required):
            raise PlotError(f"{where}: kind '{row.kind}' needs {' and '.join(kind.required)}")
        for parameter in sorted(given.difference(taken)):
            known = ", ".join(taken) or "no parameter"
            raise PlotError(
                f"{where}: {parameter} means nothing to kind '{row.kind}', which takes {known}"
            )
        found[name] = Drawing(row, kind)
    return found
