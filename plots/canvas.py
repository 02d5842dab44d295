"""What the figures share: escaping, titles, legend, footnote, watermark, saving."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import pandas as pd
from matplotlib import style as styles
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from plots.style import SOURCE_STYLES, STYLE_FILE

WIDTH_INCHES = 6.4
FORMATS = ("png", "pdf", "svg")
_HEADING_CHARACTERS = 32
_NOTE_CHARACTERS = 112
_LEGEND_CHARACTERS = 104
"""Room of a row of the legend, in characters; a handle takes eight more."""


def canvas() -> AbstractContextManager[None]:
    """The style that a figure is made and saved in."""
    context: AbstractContextManager[None] = styles.context(STYLE_FILE)
    return context


def plain(text: str) -> str:
    """Text that matplotlib does not take for mathematics."""
    return text.replace("$", r"\$")


def cases(table: pd.DataFrame) -> list[str]:
    """Cases of a table in the order of its rows; a case is what is compared in one panel."""
    return list(dict.fromkeys(table["case"]))


def short_label(label: str, case: str) -> str:
    """A run's label without the case, which is the panel's title."""
    for start in (f"{case}, ", f"{case.replace(', ', ' ')} ") if case else ():
        label = label.removeprefix(start)
    return plain(label)


def heading(ax: Axes, text: str, column: int) -> None:
    """Name a row of panels above its first; the others get a line as high, so that rows agree."""
    folded = fold(text, _HEADING_CHARACTERS)
    ax.set_title(folded if column == 0 else " " + "\n " * folded.count("\n"), loc="left")


def heading_inches(texts: Iterable[str]) -> float:
    """What headings take beyond a line each."""
    return sum(0.15 * fold(text, _HEADING_CHARACTERS).count("\n") for text in texts)


def fold(text: str, width: int) -> str:
    """Break settings into lines at their commas, and where one alone is too long at a space."""
    lines = [""]
    for part in plain(text).split(", "):
        joined = f"{lines[-1]}, {part}" if lines[-1] else part
        if len(joined) > width:
            lines += textwrap.wrap(part, width, break_on_hyphens=_longest_word(part) > width)
        else:
            lines[-1] = joined
    return "\n".join(line for line in lines if line)


def _longest_word(text: str) -> int:
    return max(map(len, text.split()), default=0)


@contextmanager
def sheet(
    names: Iterable[str],
    inches: float,
    shape: tuple[int, int],
    notes: Iterable[str],
    **layout: Any,  # noqa: ANN401 - as matplotlib's subplots takes it
) -> Iterator[tuple[Figure, Any, dict[str, Any]]]:
    """A figure of panels, with a legend above them and a footnote below.

    Args:
        names: Entries that the legend may have, in their order.
        inches: Height without the legend.
        shape: Rows and columns of panels.
        notes: What the numbers are and where they come from.
        layout: Passed on to ``subplots``.

    Yields:
        The figure, its axes, and a dict that takes the handles of the legend by their names.
    """
    names = list(names)
    with canvas():
        figure = Figure(figsize=(WIDTH_INCHES, inches + legend_inches(names)))
        entries: dict[str, Any] = {}
        yield figure, figure.subplots(*shape, squeeze=False, **layout), entries
        ordered = {name: entries[name] for name in names if name in entries} | entries
        texts = [plain(name) for name in ordered]
        if ordered:
            figure.legend(
                list(ordered.values()), texts, loc="outside upper center",
                ncols=_legend_columns(ordered),
            )  # fmt: skip
        note = textwrap.fill(plain(" · ".join(filter(None, notes))), width=_NOTE_CHARACTERS)
        figure.supxlabel(note, fontsize=7, color="0.35", x=0.01, ha="left")


def _legend_columns(names: Collection[str]) -> int:
    """As many as the longest entry leaves room for."""
    return max(1, min(len(names), _LEGEND_CHARACTERS // (max(map(len, names)) + 8), 4))


def legend_inches(names: Collection[str]) -> float:
    """Height of a legend."""
    return 0.12 + 0.17 * -(-len(names) // _legend_columns(names)) if names else 0.0


def watermark(ax: Axes, sources: Iterable[str], size: float = 22) -> None:
    """Write across a panel that it shows what was not measured, where it does."""
    for text in sorted({SOURCE_STYLES[source].watermark for source in sources} - {""}):
        ax.text(
            0.5, 0.5, text, transform=ax.transAxes, ha="center", va="center", rotation=20,
            fontsize=size, fontweight="bold", color="0.35", alpha=0.28, zorder=20, gid="watermark",
        )  # fmt: skip


def save(figure: Figure, out: Path, stem: str, text: str = "") -> list[Path]:
    """Write a figure as PNG, PDF and SVG, without a date: equal tables give equal files.

    Args:
        figure: What to write.
        out: Folder.
        stem: File name without its ending.
        text: What the figure shows, in a sentence; an SVG carries it for readers who cannot see.
    """
    with canvas():
        # Laid out once, for all formats alike.
        figure.draw_without_rendering()
        figure.set_layout_engine("none")
        _keep_labels(figure)
    paths = []
    for kind in FORMATS:
        path = out / f"{stem}.{kind}"
        beside = out / f".{stem}.{kind}"
        with canvas():
            beside.write_bytes(_rendered(figure, kind, stem, text))
        beside.replace(path)
        paths.append(path)
    return paths


def _keep_labels(figure: Figure) -> None:
    """Keep the names of axes where the layout put them.

    Names that are aligned look at every other panel in each draw: minutes for forty panels.
    """
    for ax in figure.axes:
        for axis in (ax.xaxis, ax.yaxis):
            where = axis.label.get_transform().transform(axis.label.get_position())
            axis.set_label_coords(*ax.transAxes.inverted().transform(where))


def _rendered(figure: Figure, kind: str, stem: str, text: str) -> bytes:
    no_date: dict[str, dict[str, Any]] = {
        "png": {}, "pdf": {"CreationDate": None, "Title": stem}, "svg": {"Date": None},
    }  # fmt: skip
    buffer = io.BytesIO()
    figure.savefig(buffer, format=kind, metadata=no_date[kind])
    if kind != "svg":
        return buffer.getvalue()
    note = figure.get_supxlabel().replace("\n", " ").replace(r"\$", "$")
    described = (
        f"<title>{escape(stem)}</title>\n <desc>{escape(f'{text}. {note}'.strip('. '))}</desc>"
    )
    head, start, rest = buffer.getvalue().decode("utf-8").partition("<svg ")
    attributes, end, body = rest.partition(">")
    return f'{head}{start}role="img" {attributes}{end}\n {described}{body}'.encode()
