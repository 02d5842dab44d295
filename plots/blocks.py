"""Blocks of panels over each other: a block a case, a panel a quantity, a line an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from plots.canvas import cases, fold, sheet, watermark
from plots.style import Look
from plots.tables import PlotError, Tables

_MOST_CASES = 4
Row = TypeVar("Row")


@dataclass(frozen=True)
class Blocks(Generic[Row]):
    """What a figure of blocks consists of."""

    panel: Callable[[Axes, pd.DataFrame, Row, bool], dict[str, Any]]
    """Draws one row of a case, told whether it is the last; returns handles for the legend."""
    edge_inches: float
    """Height of what surrounds the first block."""
    row_inches: float
    gap_inches: float
    """Between blocks."""
    entries: Mapping[str, Any] = field(default_factory=dict)
    """Of the legend, after the engines."""

    def draw(
        self, tables: Tables, lines: pd.DataFrame, rows: Sequence[Row], notes: Iterable[str]
    ) -> Figure:
        """Draw the first cases of some lines.

        Args:
            tables: Where the lines are from.
            lines: With ``case``, ``look``, ``source`` and ``path``.
            rows: What each block shows, from above.
            notes: For the footnote.
        """
        every = cases(lines)
        shown = every[:_MOST_CASES]
        more = len(every) - len(shown)
        left_out = f"{more} more cases not drawn" if more else ""
        names = [*(look.title() for look in sorted(lines["look"].unique())), *self.entries]
        count = len(shown) * len(rows)
        inches = self.edge_inches + count * self.row_inches + self.gap_inches * (len(shown) - 1)
        where = tables.provenance(set(lines["path"]))
        with sheet(names, inches, (count, 1), (*notes, left_out, where)) as made:
            figure, grid, entries = made
            for place, ax in enumerate(grid[:, 0]):
                case, row = shown[place // len(rows)], rows[place % len(rows)]
                block = lines[lines["case"] == case]
                entries |= self.panel(ax, block, row, row is rows[-1])
                watermark(ax, set(block["source"]), size=22 if self.row_inches > 1.5 else 14)
                if row is rows[0] and case:
                    ax.set_title(fold(case, 62), loc="left")
            entries |= self.entries
            figure.align_ylabels(grid)
        return figure


def by_look(lines: pd.DataFrame) -> Iterator[tuple[Look, pd.DataFrame]]:
    """Lines of each engine, in the order of the figures."""
    yield from sorted(lines.groupby("look", sort=False), key=lambda item: item[0])


def why_not(look: Callable[[], object]) -> str:
    """What is missing when the data of a figure is looked for; empty when nothing is."""
    try:
        look()
    except PlotError as error:
        return str(error)
    return ""
