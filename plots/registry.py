"""The kinds of figures that a study may declare: what each needs, and how it is drawn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from matplotlib.figure import Figure

from configs.errors import explain
from configs.study import Figure as FigureRow, Study
from plots import breakdown, loss, memory, models, rates, results, swept, utilisation
from plots.tables import PlotError, Tables

_PARAMETERS = ("x", "y", "complement", "label")


@dataclass(frozen=True)
class Kind:
    """One way to draw."""

    needs: str
    """Tables and columns without which it cannot be drawn; ``{x}`` and ``{y}`` are the figure's."""
    draw: Callable[[Tables, FigureRow], Figure]
    unsupported: Callable[[Tables, FigureRow], str]
    """Why the figure is not drawn unasked; empty when it is."""
    required: tuple[str, ...] = ()
    """Parameters that the study has to give."""
    optional: tuple[str, ...] = ()


@dataclass(frozen=True)
class Drawing:
    """A figure of a study that can be asked for."""

    row: FigureRow
    kind: Kind

    @property
    def needs(self) -> str:
        """Tables and columns without which it cannot be drawn."""
        return self.kind.needs.format(x=self.row.x, y=" or ".join(self.row.y))

    def draw(self, tables: Tables) -> Figure:
        """Draw it.

        Raises:
            PlotError: the tables hold nothing of it.
        """
        return self.kind.draw(tables, self.row)

    def unsupported(self, tables: Tables) -> str:
        """Why it is not drawn unasked; empty when it is."""
        return self.kind.unsupported(tables, self.row)


def _fixed(
    needs: str, draw: Callable[[Tables], Figure], unsupported: Callable[[Tables], str]
) -> Kind:
    """A kind that takes no parameters."""
    return Kind(needs, lambda tables, _: draw(tables), lambda tables, _: unsupported(tables))


KINDS = {
    "breakdown": _fixed(
        "runs: iteration_ms and the phases", breakdown.draw, breakdown.unsupported
    ),
    "loss": _fixed("iterations: iteration, loss", loss.draw, loss.unsupported),
    "swept": Kind(
        "runs: {x}; {y}", swept.draw, swept.unsupported, ("x", "y"), ("complement", "label")
    ),
    "ratios": Kind(
        "runs: {x}; {y}. comparisons: case, engine, phase, ratio, speedup, withheld",
        partial(swept.draw, with_ratios=True), swept.unsupported, ("x", "y"),
        ("complement", "label"),
    ),
    "models": _fixed(
        "runs: model; iteration_ms; update_rate for the throughput", models.draw, models.unsupported
    ),
    "rates": Kind("runs: {x}; {y}", rates.draw, rates.unsupported, ("x", "y")),
    "results": Kind("runs: {y}", results.draw, results.unsupported, ("y",)),
    "memory": _fixed(
        "memory: iteration, title; allocated_gib, cached_gib or host_used_gib",
        memory.draw, memory.unsupported,
    ),
    "utilisation": _fixed(
        "monitor: time_s; cpu_percent, host_used_bytes, gpu_* or pcie_*",
        utilisation.draw, utilisation.unsupported,
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
