"""What the figures share: escaping, the footnote, one panel a case, saving."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pandas as pd
from matplotlib import style as styles
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from plots.style import STYLE_FILE

WIDTH_INCHES = 6.4
_TITLE_CHARACTERS = 72
_FORMATS = ("png", "pdf")


def plain(text: str) -> str:
    """Text that matplotlib does not take for mathematics."""
    return text.replace("$", r"\$")


def cases(table: pd.DataFrame) -> list[str]:
    """Cases of a table in the order of its rows; a case is what is compared in one panel."""
    return list(dict.fromkeys(table["case"]))


def short_label(label: str, case: str) -> str:
    """A run's label without the case, which is the panel's title."""
    return plain(label.removeprefix(f"{case}, ") if case else label)


def title(ax: Axes, case: str, columns: int) -> None:
    """Name a panel after its case, folded so that it does not run into its neighbour."""
    lines = [""]
    for part in plain(case).split(", "):
        joined = f"{lines[-1]}, {part}" if lines[-1] else part
        if len(joined) > _TITLE_CHARACTERS // columns:
            lines.append(part)
        else:
            lines[-1] = joined
    ax.set_title("\n".join(line for line in lines if line), loc="left")


def footnote(figure: Figure, text: str) -> None:
    """Write under a figure where its numbers come from."""
    lines = textwrap.fill(plain(text), width=105)
    figure.supxlabel(lines, fontsize=7, color="0.35", x=0.01, ha="left")


def save(figure: Figure, out: Path, stem: str) -> list[Path]:
    """Write a figure as PNG and PDF, without a date, so that equal tables give equal files."""
    paths = []
    for kind in _FORMATS:
        path = out / f"{stem}.{kind}"
        beside = out / f".{stem}.{kind}"
        metadata = {"CreationDate": None} if kind == "pdf" else None
        with styles.context(STYLE_FILE):
            figure.savefig(beside, format=kind, metadata=metadata)
        beside.replace(path)
        paths.append(path)
    return paths
