"""Speed-ups over the reference, beside the times that they are of.

A ratio is drawn only where ``comparisons.csv`` claims it; the panel says how many others it
withholds, and why.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import pandas as pd
from matplotlib.axes import Axes

from plots.canvas import fold
from plots.lines import draw_lines
from plots.observations import X
from plots.series import Panel, Series, Value
from plots.tables import SIMULATED, PlotError, Tables
from plots.units import ONE


@dataclass(frozen=True)
class Ratios:
    """Comparisons of one phase, or of whole iterations."""

    rows: pd.DataFrame
    phase: str
    reference: str

    @classmethod
    def of(cls, tables: Tables, column: str) -> Self | None:
        """The comparisons of a time, by its column; None where there is no table of them."""
        phase = column.removesuffix("_ms")
        try:
            table = tables.comparisons
        except PlotError:
            return None
        # The point has the name in runs.csv that its comparison has as a label.
        rows = table[table["phase"] == phase].assign(point=table["label"])
        return cls(rows, phase, tables.study.reference)

    @property
    def how(self) -> str:
        """What the ratios are, for the footnote."""
        if (self.rows["source"] == SIMULATED).all():
            return f"ratio: {self.reference}'s predicted {self.phase} over the engine's"
        return "speed-up: ratio of medians with its interval in comparisons.csv"

    def draw(self, ax: Axes, many: Sequence[Series], panel: Panel) -> None:
        """Draw the ratios of a panel that are claimed; say of the others why not."""
        known = panel.runs[["point", "source", X, "look"]].drop_duplicates()
        own = self.rows.drop(columns=X, errors="ignore")
        rows = own.merge(known, on=["point", "source"]).sort_values(X)
        predicted = rows["source"] == SIMULATED
        claimed = rows[((rows["speedup"] != "") | predicted) & rows["ratio"].notna()]
        for one in many:
            mine = claimed[(claimed["look"] == one.look) & (claimed["source"] == one.source)]
            values = tuple(_value(row) for _, row in mine.iterrows())
            draw_lines(ax, [Series(one.look, one.source, values)], ONE)
        ax.axhline(1.0, color="0.4", linewidth=0.8, zorder=1)
        what = "predicted ratio to" if predicted.any() else "speed-up over"
        ax.set_ylabel(f"{what} {self.reference}")
        ax.set_ylim(0, 1.15 * max([1.0, *claimed["ratio"], *claimed["ratio_high"].dropna()]))
        ax.text(
            0.97, 0.05, _withheld(rows, rows.drop(claimed.index)), transform=ax.transAxes,
            ha="right", va="bottom", fontsize=7, color="0.25", zorder=12, gid="withheld",
        )  # fmt: skip


def _value(row: pd.Series) -> Value:
    ratio = float(row["ratio"])
    low, high = (float(row[name]) for name in ("ratio_low", "ratio_high"))
    low, high = (ratio if pd.isna(end) else end for end in (low, high))
    return Value(float(row[X]), ratio, min(low, ratio), max(high, ratio), 0, 0)


def _withheld(rows: pd.DataFrame, rest: pd.DataFrame) -> str:
    """``3 of 8 ratios withheld: ...``; empty when all are drawn."""
    if rest.empty:
        return "" if len(rows) else "nothing compared"
    reasons = sorted({reason for reason in rest["withheld"] if reason})
    text = f"{len(rest)} of {len(rows)} ratios withheld"
    return "\n".join([text, *(fold(reason, 44) for reason in reasons[:3])])
