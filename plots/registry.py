"""The kinds of figures that a study may declare: what each needs, and how it is drawn."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple, Protocol

from matplotlib.figure import Figure

from configs.errors import explain
from configs.study import Figure as FigureRow, Study
from plots import breakdown, loss, memory, models, rates, results, swept, utilisation
from plots.tables import PlotError, Tables

_PARAMETERS = ("x", "y", "complement", "label")


class Draw(Protocol):
    """How a figure is drawn."""

    def __call__(self, tables: Tables, figure: FigureRow, /, *, asked: bool) -> list[Figure]:
        """Draw the pages of a figure.

        Raises:
            PlotError: the tables hold nothing of it or, unless it was asked for, nothing worth it.
        """


class Kind(NamedTuple):
    """One way to draw."""

    needs: str
    """Tables and columns without which it cannot be drawn; ``{x}`` and ``{y}`` are the figure's."""
    draw: Draw
    required: tuple[str, ...] = ()
    """Parameters that the study has to give."""
    optional: tuple[str, ...] = ()


class Drawing(NamedTuple):
    """A figure of a study that can be asked for."""

    row: FigureRow
    kind: Kind

    @property
    def needs(self) -> str:
        """Tables and columns without which it cannot be drawn."""
        return self.kind.needs.format(x=self.row.x, y=" or ".join(self.row.y))

    def draw(self, tables: Tables, *, asked: bool = True) -> list[Figure]:
        """Draw its pages; see :class:`Draw`."""
        return self.kind.draw(tables, self.row, asked=asked)


KINDS = {
    "breakdown": Kind("runs: iteration_ms and the phases", breakdown.draw),
    "loss": Kind("iterations: iteration, loss", loss.draw),
    "swept": Kind("runs: {x}; {y}", swept.draw, ("x", "y"), ("complement", "label")),
    "ratios": Kind(
        "runs: {x}; {y}. comparisons: case, engine, phase, ratio, speedup, withheld",
        partial(swept.draw, with_ratios=True), ("x", "y"), ("complement", "label"),
    ),
    "models": Kind("runs: model; iteration_ms; update_rate for the throughput", models.draw),
    "rates": Kind("runs: {x}; {y}", rates.draw, ("x", "y")),
    "memory": Kind(
        "memory: iteration, title; allocated_gib, cached_gib or host_used_gib", memory.draw
    ),
    "results": Kind("runs: {y}", results.draw, ("y",)),
    "utilisation": Kind(
        "monitor: time_s; cpu_percent, host_used_bytes, gpu_* or pcie_*", utilisation.draw
    ),
}  # fmt: skip


def figures(study: Study) -> dict[str, Drawing]:
    """The figures of a study by their names, in its order.

    Raises:
        PlotError: the study declares a figure that no kind can draw.
    """
    found = {}
    for name, row in study.figures.items():
        where = f"study '{study.name}', figure '{name}'"
        if row.kind not in KINDS:
            raise PlotError(f"{where}: {explain.unknown('kind', row.kind, KINDS)}")
        kind = KINDS[row.kind]
        given = [parameter for parameter in _PARAMETERS if getattr(row, parameter)]
        taken = (*kind.required, *kind.optional)
        for parameter in kind.required:
            if parameter not in given:
                raise PlotError(f"{where}: kind '{row.kind}' needs {' and '.join(kind.required)}")
        for parameter in given:
            if parameter not in taken:
                known = ", ".join(taken) or "no parameter"
                raise PlotError(
                    f"{where}: {parameter} means nothing to kind '{row.kind}', which takes {known}"
                )
        found[name] = Drawing(row, kind)
    return found
