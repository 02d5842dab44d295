"""Shared by all figures: texts, a sheet of panels with legend and footnote, saving."""

from __future__ import annotations

import csv
import io
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib import style as styles
from matplotlib.axes import Axes
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from plots.current import FORMATS
from plots.style import SOURCE_STYLES, STYLE_FILE
from plots.tables import PlotError
from plots.units import short

_WIDTH_INCHES = 6.4
_NOTE_CHARACTERS = 112
_LEGEND_CHARACTERS = 104
"""Room of a row of the legend, in characters; a handle takes eight more."""
_CHARACTER_INCHES = 0.065
_SLANTED_INCHES = 0.17
"""Between names of ticks that are slanted, so that their lines do not touch."""
_FARTHEST = 24
"""Places that a name tries in each direction."""


class Mark(NamedTuple):
    """A mark of a panel, and what is written beside it."""

    ax: Axes
    at: tuple[float, float]
    """In the panel's units."""
    width: float
    """In points."""
    name: str
    """Empty for none."""
    colour: str = "black"


def plain(text: str) -> str:
    """Return a text that matplotlib does not take for mathematics."""
    return text.replace("$", r"\$")


def fold(text: str, width: int) -> str:
    """Break settings into lines at their commas, and where one alone is too long at a space."""
    lines = [""]
    for part in plain(text).split(", "):
        joined = f"{lines[-1]}, {part}" if lines[-1] else part
        if len(joined) > width:
            longest = max(map(len, part.split()), default=0)
            lines += textwrap.wrap(part, width, break_on_hyphens=longest > width)
        else:
            lines[-1] = joined
    return "\n".join(line for line in lines if line)


@contextmanager
def sheet(
    handles: Mapping[str, Any],
    inches: float,
    shape: tuple[int, int],
    notes: Iterable[str],
    **layout: Any,
) -> Iterator[tuple[Figure, Any]]:
    """Make a figure of panels in the paper's style, a legend above them and a footnote below.

    Args:
        handles: The legend's, by their names.
        inches: Height without the legend.
        shape: Rows and columns of panels.
        notes: What the numbers are and where they come from.
        layout: Passed on to ``subplots``.

    Yields:
        The figure and its axes, (rows, columns).
    """
    longest = max(map(len, handles), default=0)
    columns = max(1, min(len(handles), _LEGEND_CHARACTERS // (longest + 8), 4))
    with styles.context(STYLE_FILE, after_reset=True):
        height = 0.12 + 0.17 * -(-len(handles) // columns) if handles else 0.0
        figure = Figure(figsize=(_WIDTH_INCHES, inches + height))
        yield figure, figure.subplots(*shape, squeeze=False, **layout)
        if handles:
            names = list(map(plain, handles))
            figure.legend(list(handles.values()), names, loc="outside upper center", ncols=columns)
        note = textwrap.fill(plain(" · ".join(filter(None, notes))), width=_NOTE_CHARACTERS)
        figure.supxlabel(note, fontsize=7, color="0.35", x=0.01, ha="left")


def watermark(ax: Axes, sources: Iterable[str], size: float = 22) -> None:
    """Write behind what a panel shows that it was not measured, where it was not."""
    for text in sorted({SOURCE_STYLES[source].watermark for source in sources} - {""}):
        ax.text(
            0.5, 0.5, text, transform=ax.transAxes, ha="center", va="center", rotation=20,
            fontsize=size, fontweight="bold", color="0.35", alpha=0.16, zorder=0.1, gid="watermark",
        )  # fmt: skip


def name_marks(figure: Figure, marks: Sequence[Mark]) -> None:
    """Write a name beside each mark where there is room, over no other name and no other mark.

    Args:
        figure: Complete, legend and footnote included: names change nothing of its layout.
        marks: In the order in which they choose their places.
    """
    with styles.context(STYLE_FILE, after_reset=True):
        texts = {
            number: mark.ax.annotate(
                plain(mark.name), mark.at, xytext=(0, 0), textcoords="offset points", fontsize=6,
                color=mark.colour, ha="center", va="center", in_layout=False,
                arrowprops={"arrowstyle": "-", "linewidth": 0.3, "color": "0.6", "shrinkA": 0},
            )
            for number, mark in enumerate(marks)
            if mark.name
        }  # fmt: skip
        figure.draw_without_rendering()
        point = figure.dpi / 72
        places = [mark.ax.transData.transform(mark.at) for mark in marks]
        widths = [mark.width * point for mark in marks]
        taken = [_box(x, y, w, w) for (x, y), w in zip(places, widths, strict=True)]
        for number, text in texts.items():
            mark, (x, y) = marks[number], places[number]
            size, panel = Text.get_window_extent(text), mark.ax.bbox
            others = [*taken[:number], *taken[number + 1 :]]
            for dx, dy in _around(size.width / point, size.height / point, mark.width / 2):
                box = _box(x + dx * point, y + dy * point, size.width, size.height)
                inside = panel.x0 < box.x0 and box.x1 < panel.x1
                inside = inside and panel.y0 < box.y0 and box.y1 < panel.y1
                if inside and not any(map(box.overlaps, others)):
                    text.xyann = (dx, dy)
                    taken.append(box)
                    break


def _around(width: float, height: float, reach: float) -> Iterator[tuple[float, float]]:
    """Yield where the middle of a name may lie from its mark, nearer places first, in points."""
    for far in range(_FARTHEST):
        room = reach + 1 + 5 * far
        for x, y in ((1, 1), (1, 0), (1, -1), (-1, 1), (-1, 0), (-1, -1), (0, 1), (0, -1)):
            yield x * (width / 2 + room), y * (height / 2 + room)


def _box(x: float, y: float, width: float, height: float) -> Bbox:
    return Bbox.from_bounds(x - width / 2, y - height / 2, width, height)


def name_ticks(ax: Axes, at: Sequence[float], names: Sequence[str], columns: int = 1) -> None:
    """Set a named tick at each value, near the ends of the axis the first and the last.

    Names that would touch are slanted, and those without room even so are left out.

    Args:
        ax: The panel; its scale is already set.
        at: Values, ascending.
        names: One for each value.
        columns: Panels beside each other.
    """
    to_scale = ax.transScale
    places = to_scale.transform([(value, 1.0) for value in at])[:, 0]
    margin = 0.08 * (places[-1] - places[0]) or 0.5
    ends = [(places[0] - margin, 0.0), (places[-1] + margin, 0.0)]
    ax.set_xlim(*to_scale.inverted().transform(ends)[:, 0])
    width = _WIDTH_INCHES / columns - 0.9
    inches = [width * (place - ends[0][0]) / (ends[1][0] - ends[0][0]) for place in places]
    room = zip(pairwise(inches), pairwise(names), strict=True)
    if all(b - a > _CHARACTER_INCHES * (len(x) + len(y)) / 2 for (a, b), (x, y) in room):
        ax.set_xticks(at, list(map(plain, names)))
        return
    texts, free_from = [], 0.0
    for place, name in zip(inches, names, strict=True):
        texts.append(plain(name) if place >= free_from else "")
        free_from = place + _SLANTED_INCHES if texts[-1] else free_from
    ax.set_xticks(at, texts, rotation=40, ha="right", rotation_mode="anchor", fontsize=7)


def numbers(figure: Figure) -> list[tuple[str, str, str, str]]:
    """Return what a figure shows of bars and marks that have a label: panel, name, label, value.

    A bar's label is its name and, in a second line, what it is; a mark is named by the tick below
    it. Lines of hundreds of iterations have no label: they are in the tables. A panel without a
    title is of the case to its left.
    """
    found, panel = [], ""
    for ax in figure.axes:
        panel = ax.get_title(loc="left").replace("\n", ", ") or panel
        for bars in ax.containers:
            if isinstance(bars, BarContainer) and _is_told(bars.get_label()):
                name, _, what = str(bars.get_label()).partition("\n")
                found.append((panel, name, what, short(bars.patches[0].get_width())))
        texts = (text.get_text() for text in ax.get_xticklabels())
        ticks = dict(zip(ax.get_xticks(), texts, strict=False))
        for line in ax.get_lines():
            if _is_told(line.get_label()):
                for x, y in np.asarray(line.get_xydata(), dtype=float).tolist():
                    at = ticks.get(x) or short(x)
                    found.append((panel, at, str(line.get_label()), short(y)))
    return [
        (panel.replace(r"\$", "$"), name.replace(r"\$", "$"), what.replace(r"\$", "$"), value)
        for panel, name, what, value in found
    ]


def _is_told(label: object) -> bool:
    return bool(label) and not str(label).startswith("_")


def save(figure: Figure, out: Path, stem: str, text: str = "") -> list[Path]:
    """Write a figure as PNG, PDF and SVG, without a date: equal tables give equal files.

    Beside them lies ``STEM.csv`` with its :func:`numbers`, if it has any.

    Args:
        figure: What to write.
        out: Folder.
        stem: File name without its ending.
        text: What the figure shows, in a sentence; an SVG carries it for readers who cannot see.

    Returns:
        The files.

    Raises:
        PlotError: a file cannot be written.
    """
    note = figure.get_supxlabel().replace("\n", " ").replace(r"\$", "$")
    about: dict[str, dict[str, Any]] = {
        "png": {},
        "pdf": {"CreationDate": None, "Title": stem},
        "svg": {"Date": None, "Title": stem, "Description": f"{text}. {note}"},
    }
    written = []
    for kind in FORMATS:
        path, buffer = out / f"{stem}.{kind}", io.BytesIO()
        with styles.context(STYLE_FILE, after_reset=True):
            figure.savefig(buffer, format=kind, metadata=about[kind])
        figure.set_layout_engine("none")  # all formats are laid out alike
        _write(path, buffer.getvalue())
        written.append(path)
    told, beside = numbers(figure), out / f"{stem}.csv"
    beside.unlink(missing_ok=True)
    if told:
        table = io.StringIO()
        rows = [("panel", "name", "what", "value"), *told]
        csv.writer(table, lineterminator="\n").writerows(rows)
        _write(beside, table.getvalue().encode())
    return written


def _write(path: Path, content: bytes) -> None:
    beside = path.with_name(f".{path.name}")
    try:
        beside.write_bytes(content)
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise PlotError(f"{path}: cannot be written: {error.strerror}") from None
