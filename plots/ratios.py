"""Speed-ups over the reference, beside the times that they are of.

A ratio is drawn only where ``comparisons.csv`` claims it; the panel says how many others it
withholds, and why.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
from matplotlib.axes import Axes

from plots.canvas import fold
from plots.lines import draw_lines
from plots.observations import X, settle_own_fields
from plots.series import Panel, Series, Value
from plots.tables import MEASURED, SIMULATED, PlotError, Tables
from plots.units import ONE


class Ratios:
    """Comparisons of one phase, or of whole iterations."""

    def __init__(self, rows: pd.DataFrame, keys: list[str], phase: str, reference: str) -> None:
        self._rows, self._keys, self._phase, self._reference = rows, keys, phase, reference

    @classmethod
    def of(cls, tables: Tables, column: str) -> Ratios:
        """The comparisons of a time, by its column; none where there is no table of them."""
        study, phase = tables.study, column.removesuffix("_ms")
        try:
            table = tables.comparisons
        except PlotError:
            return cls(pd.DataFrame(), [], phase, study.reference)
        own = [name for name, row in study.fields.items() if row.only_some_engines]
        rows = table[table["phase"] == phase]
        rows = rows.assign(**{name: "" for name in own if name not in rows})
        rows = settle_own_fields(rows, study)
        keys = ["case", "engine", *(name for name in study.fields if name in rows)]
        rows["source"] = rows["source"].replace("", MEASURED)
        return cls(rows, keys, phase, study.reference)

    @property
    def known(self) -> bool:
        """Whether there is a table of comparisons."""
        return len(self._rows.columns) > 0

    @property
    def how(self) -> str:
        """What the ratios are, for the footnote."""
        if not self.known:
            return "no comparisons"
        if (self._rows["source"] == SIMULATED).all():
            return f"ratio: {self._reference}'s predicted {self._phase} over the engine's"
        return "speed-up: ratio of medians with its interval in comparisons.csv"

    def draw(self, ax: Axes, many: Sequence[Series], panel: Panel) -> None:
        """Draw the ratios of a panel that are claimed; say of the others why not."""
        known = panel.runs[[*self._keys, X, "look"]].drop_duplicates()
        rows = self._rows.drop(columns=X, errors="ignore").merge(known, on=self._keys)
        claimed = rows[_claimed(rows)]
        for one in many:
            own = claimed[(claimed["look"] == one.look) & (claimed["source"] == one.source)]
            values = tuple(_value(row) for _, row in own.sort_values(X).iterrows())
            draw_lines(ax, [Series(one.look, one.source, values)], ONE)
        ax.axhline(1.0, color="0.4", linewidth=0.8, zorder=1)
        predicted = (rows["source"] == SIMULATED).any()
        what = "predicted ratio to" if predicted else "speed-up over"
        ax.set_ylabel(f"{what} {self._reference}")
        ax.set_ylim(0, 1.15 * max([1.0, *claimed["ratio"], *claimed["ratio_high"].dropna()]))
        ax.text(
            0.97, 0.05, _withheld(rows), transform=ax.transAxes, ha="right", va="bottom",
            fontsize=7, color="0.25", zorder=12, gid="withheld",
        )  # fmt: skip


def _claimed(rows: pd.DataFrame) -> pd.Series:
    """Which comparisons claim a speed-up, or predict a ratio."""
    shown = (rows["speedup"] != "") | (rows["source"] == SIMULATED)
    return shown & rows["ratio"].notna()


def _value(row: pd.Series) -> Value:
    ratio = float(row["ratio"])
    low, high = (float(row[name]) for name in ("ratio_low", "ratio_high"))
    low, high = (ratio if pd.isna(end) else end for end in (low, high))
    return Value(float(row[X]), ratio, min(low, ratio), max(high, ratio), 0, 0)


def _withheld(rows: pd.DataFrame) -> str:
    """``3 of 8 ratios withheld: ...``; empty when all are drawn."""
    rest = rows[~_claimed(rows)]
    if rest.empty:
        return "" if len(rows) else "nothing compared"
    text = f"{len(rest)} of {len(rows)} ratios withheld"
    reasons = sorted({reason for reason in rest["withheld"] if reason})
    return "\n".join([text, *(fold(reason, 44) for reason in reasons[:3])])
