"""What the figures share: escaping, titles, legend, footnote, watermark, pages, saving."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar
from xml.sax.saxutils import escape

import numpy as np
from matplotlib import style as styles
from matplotlib.axes import Axes
from matplotlib.collections import PathCollection
from matplotlib.figure import Figure
from matplotlib.text import Annotation
from matplotlib.ticker import FixedLocator
from matplotlib.transforms import Bbox

from plots.style import SOURCE_STYLES, STYLE_FILE
from plots.tables import PlotError

WIDTH_INCHES = 6.4
FORMATS = ("png", "pdf", "svg")
INSIDE = "inside"
"""Group of texts that are shown only where the bar around them has room."""
BESIDE = "beside"
"""Group of texts that are moved around their mark, or hidden, so that they cover nothing."""
_AROUND = ((6, 3), (6, -7), (-6, 3), (-6, -7), (0, 8), (0, -12), (6, 10), (6, -14), (-6, -14))
"""Where such a text may stand, in points from its mark."""
_PAGE_INCHES = 10.0
"""Height of the panels of a page; a figure with more of them has several pages."""
_NOTE_CHARACTERS = 112
_LEGEND_CHARACTERS = 104
"""Room of a row of the legend, in characters; a handle takes eight more."""
_SLANT_DEGREES = 40
_SLANTED_POINTS = 14.0
"""Between names of ticks that are slanted, so that their lines do not touch."""
Item = TypeVar("Item")


def canvas() -> AbstractContextManager[None]:
    """The style that a figure is made and saved in."""
    context: AbstractContextManager[None] = styles.context(STYLE_FILE)
    return context


def plain(text: str) -> str:
    """Text that matplotlib does not take for mathematics."""
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


def pages(items: Iterable[Item], inches: Callable[[Item], float]) -> list[list[Item]]:
    """Deal what a figure shows onto pages, in order.

    Args:
        items: What must not be torn apart: a panel, a row of panels, a block of them.
        inches: Height of one.
    """
    found: list[list[Item]] = []
    room = 0.0
    for item in items:
        if not found or inches(item) > room:
            found.append([])
            room = _PAGE_INCHES
        found[-1].append(item)
        room -= inches(item)
    return found


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
        height = 0.12 + 0.17 * -(-len(names) // _legend_columns(names)) if names else 0.0
        figure = Figure(figsize=(WIDTH_INCHES, inches + height))
        entries: dict[str, Any] = {}
        yield figure, figure.subplots(*shape, squeeze=False, **layout), entries
        ordered = {name: entries[name] for name in names if name in entries} | entries
        if ordered:
            figure.legend(
                list(ordered.values()), list(map(plain, ordered)), loc="outside upper center",
                ncols=_legend_columns(ordered),
            )  # fmt: skip
        note = textwrap.fill(plain(" · ".join(filter(None, notes))), width=_NOTE_CHARACTERS)
        figure.supxlabel(note, fontsize=7, color="0.35", x=0.01, ha="left")


def _legend_columns(names: Collection[str]) -> int:
    """As many as the longest entry leaves room for."""
    return max(1, min(len(names), _LEGEND_CHARACTERS // (max(map(len, names)) + 8), 4))


def watermark(ax: Axes, sources: Iterable[str], size: float = 22) -> None:
    """Write behind what a panel shows that it was not measured, where it was not."""
    for text in sorted({SOURCE_STYLES[source].watermark for source in sources} - {""}):
        ax.text(
            0.5, 0.5, text, transform=ax.transAxes, ha="center", va="center", rotation=20,
            fontsize=size, fontweight="bold", color="0.35", alpha=0.16, zorder=0.1, gid="watermark",
        )  # fmt: skip


def save(
    figures: Sequence[Figure],
    out: Path,
    stem: str,
    text: str = "",
) -> list[Path]:
    """Write the pages of a figure as PNG, PDF and SVG, without a date.

    Equal tables give equal files. Pages of an older drawing that had more of them are removed.

    Args:
        figures: Its pages; those after the first are called ``STEM-page-2`` and so on.
        out: Folder.
        stem: File name without its ending.
        text: What the figure shows, in a sentence; an SVG carries it for readers who cannot see.

    Returns:
        The files, the first page first.

    Raises:
        PlotError: a file cannot be written.
    """
    written = []
    for number, figure in enumerate(figures, 1):
        name = stem if number == 1 else f"{stem}-page-{number}"
        settle(figure)
        for kind in FORMATS:
            path, beside = out / f"{name}.{kind}", out / f".{name}.{kind}"
            try:
                with canvas():
                    beside.write_bytes(_rendered(figure, kind, name, text))
                beside.replace(path)
            except OSError as error:
                with suppress(OSError):
                    beside.unlink(missing_ok=True)
                raise PlotError(f"{path}: cannot be written: {error.strerror}") from None
            written.append(path)
    for path in set(out.glob(f"{stem}-page-[0-9]*.*")) - set(written):
        if path.suffix[1:] in FORMATS:
            path.unlink()
    return written


def settle(figure: Figure) -> None:
    """Lay a figure out once, for all formats alike, and part or hide texts without room."""
    with canvas():
        figure.draw_without_rendering()
        for ax in figure.axes:
            _part(ax)
            # Other ticks than those that were laid out would have names of another length.
            for axis in (ax.xaxis, ax.yaxis):
                if not isinstance(axis.get_major_locator(), FixedLocator):
                    axis.set_major_locator(FixedLocator(list(axis.get_majorticklocs())))
        figure.draw_without_rendering()
        for ax in figure.axes:
            _hide_what_does_not_fit(ax)
            _keep_apart(ax)
        figure.set_layout_engine("none")
        # Names that are aligned look at every other panel in each draw: minutes for forty panels.
        for ax in figure.axes:
            for axis in (ax.xaxis, ax.yaxis):
                where = axis.label.get_transform().transform(axis.label.get_position())
                axis.set_label_coords(*ax.transAxes.inverted().transform(where))


def _hide_what_does_not_fit(ax: Axes) -> None:
    """Hide texts that are wider than the bar that they stand in."""
    boxes = [patch.get_window_extent() for patch in ax.patches]
    for text in (text for text in ax.texts if text.get_gid() == INSIDE):
        own = text.get_window_extent()
        centre = (own.x0 + own.x1) / 2, (own.y0 + own.y1) / 2
        text.set_visible(any(b.contains(*centre) and b.width > 1.1 * own.width for b in boxes))


def _keep_apart(ax: Axes) -> None:
    """Put the name of each mark where it covers nothing, and hide one that has no such place."""
    scale = ax.figure.dpi / 72
    taken = []
    for marks in ax.collections:
        if not isinstance(marks, PathCollection):
            continue
        places = np.atleast_2d(np.asarray(marks.get_offsets()))
        for at, size in zip(places, marks.get_sizes(), strict=False):
            half = math.sqrt(size) / 2 * scale
            x, y = ax.transData.transform(at)
            taken.append(Bbox.from_extents(x - half, y - half, x + half, y + half))
    # Left of the axes stand the names of ticks, right of them nothing up to the next panel.
    leftmost, rightmost = ax.bbox.x0, ax.bbox.x1 + 8 * scale
    for name in ax.texts:
        if not isinstance(name, Annotation) or name.get_gid() != BESIDE:
            continue
        for across, up in _AROUND:
            name.xyann = (across, up)
            name.set_horizontalalignment("left" if across > 0 else "right" if across else "center")
            box = name.get_window_extent()
            inside = leftmost <= box.x0 and box.x1 <= rightmost
            if inside and not any(box.overlaps(other) for other in taken):
                taken.append(box)
                break
        else:
            name.set_visible(False)


def _part(ax: Axes) -> None:
    """Slant the names of ticks where they touch, and leave out those without room even so."""
    names = ax.get_xticklabels()
    boxes = [name.get_window_extent() for name in names if name.get_text() and name.get_visible()]
    fixed = isinstance(ax.xaxis.get_major_locator(), FixedLocator)
    if not fixed or all(one.x1 + 2 < other.x0 for one, other in pairwise(boxes)):
        return
    texts, free_from = [], -math.inf
    least = _SLANTED_POINTS * ax.figure.dpi / 72
    for name in names:
        box = name.get_window_extent()
        at = (box.x0 + box.x1) / 2
        texts.append(name.get_text() if at >= free_from else "")
        free_from = at + least if texts[-1] else free_from
    ax.set_xticks(
        [name.get_position()[0] for name in names], texts, rotation=_SLANT_DEGREES, ha="right",
        rotation_mode="anchor", fontsize=7,
    )  # fmt: skip


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
