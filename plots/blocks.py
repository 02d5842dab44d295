"""Blocks of panels over each other: a block a case, a panel a quantity, a line an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from plots.canvas import fold, pages, sheet, watermark
from plots.style import Look
from plots.tables import Tables

Row = TypeVar("Row")


@dataclass(frozen=True)
class Blocks(Generic[Row]):
    """What a figure of blocks consists of."""

    panel: Callable[[Axes, pd.DataFrame, Row, bool], dict[str, Any]]
    """Draws one row of a case, told whether it is the last; returns handles for the legend."""
    row_inches: float
    below_inches: float
    """Of what is below a block."""
    entries: Mapping[str, Any] = field(default_factory=dict)
    """Of the legend, after the engines."""

    def draw(
        self, tables: Tables, lines: pd.DataFrame, rows: Sequence[Row], notes: Sequence[str]
    ) -> list[Figure]:
        """Draw pages of the blocks of some lines.

        Args:
            tables: Where the lines are from.
            lines: With ``case``, ``look``, ``source`` and ``path``.
            rows: What each block shows, from above.
            notes: For the footnote.
        """
        names = [*(look.name for look in sorted(lines["look"].unique())), *self.entries]
        inches = self.below_inches + len(rows) * self.row_inches
        footnotes = [*notes, tables.provenance(set(lines["path"]))]
        figures = []
        for page in pages(lines.groupby("case", sort=False), lambda _: inches):
            shape = len(page) * len(rows), 1
            with sheet(names, 0.6 + len(page) * inches, shape, footnotes) as made:
                figure, grid, entries = made
                for place, ax in enumerate(grid[:, 0]):
                    (case, block), row = page[place // len(rows)], rows[place % len(rows)]
                    entries |= self.panel(ax, block, row, row is rows[-1])
                    watermark(ax, set(block["source"]), size=22 if self.row_inches > 1.5 else 14)
                    if row is rows[0] and case:
                        ax.set_title(fold(case, 62), loc="left")
                entries |= self.entries
                figure.align_ylabels(grid)
            figures.append(figure)
        return figures


def by_look(lines: pd.DataFrame) -> Iterator[tuple[Look, pd.DataFrame]]:
    """Lines of each engine, in the order of the figures."""
    yield from sorted(lines.groupby("look", sort=False), key=lambda item: item[0])
