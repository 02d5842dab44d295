"""Colour, hatch, dash and marker of every phase, engine and source, in one place.

Colours are Okabe and Ito's, which stay apart for colour-blind readers; hatches, dashes and markers
carry the same distinction on grey paper.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from plots.tables import MEASURED, PUBLISHED, SIMULATED

STYLE_FILE = Path(__file__).resolve().parent / "paper.mplstyle"


@dataclass(frozen=True)
class PhaseStyle:
    """A segment of a bar."""

    title: str
    colour: str
    hatch: str
    text_colour: str


@dataclass(frozen=True)
class EngineStyle:
    """A line or a bar; wider lines are drawn first, so that equal ones show through."""

    title: str
    colour: str
    dash: str | tuple[int, tuple[int, ...]]
    marker: str
    width: float
    marker_size: float
    hatch: str
    filled: bool = True


@dataclass(frozen=True)
class SourceStyle:
    """What sets numbers apart that were not measured here."""

    hollow: bool
    """Markers and bars without a fill."""
    watermark: str
    """Written across the axes; empty for none."""
    alpha: float
    """Opacity of lines and of bars."""


PHASES = {
    "forward": PhaseStyle("forward", "#56B4E9", "", "black"),
    "backward": PhaseStyle("backward", "#E69F00", "///", "black"),
    "update": PhaseStyle("update", "#009E73", "...", "black"),
    "other": PhaseStyle("outside the phases", "#FFFFFF", "", "black"),
}
ENGINES = {
    "vanilla": EngineStyle("ZeRO-3 offload (vanilla)", "#999999", "solid", "o", 4.5, 8.0, ""),
    "async-gradients": EngineStyle(
        "asynchronous gradients", "#0072B2", "solid", "s", 2.2, 4.5, "///"
    ),
    "hybrid": EngineStyle("hybrid", "#D55E00", (0, (4, 3)), "x", 1.4, 5.0, "\\\\\\"),
}
"""In the order in which figures show them."""
UNKNOWN_ENGINE = EngineStyle("unknown engine", "#CC79A7", (0, (1, 2)), "^", 1.4, 4.0, "++")
SOURCE_STYLES = {
    MEASURED: SourceStyle(hollow=False, watermark="", alpha=1.0),
    SIMULATED: SourceStyle(hollow=False, watermark="simulated", alpha=0.55),
    PUBLISHED: SourceStyle(hollow=True, watermark="", alpha=1.0),
}

_VARIANT_MARKERS = ("p", "^", "v", "P", "<", ">", "*")
_VARIANT_HATCHES = ("xxx", "--", "oo", "||", "**", "OO", "xx--")


def engine_style(engine: str, variant: int = 0) -> EngineStyle:
    """Style of an engine by its name in the tables, where lines may lie over each other.

    Args:
        engine: ``vanilla``, ``async-gradients``, ``hybrid``; others look alike.
        variant: Position among the runs of that engine in one panel; each has its own marker and
            hatch and, past the first, its own dash.
    """
    style = ENGINES.get(engine, UNKNOWN_ENGINE)
    if variant == 0:
        return style
    size, dash = 7.0 + 1.5 * variant, (2 * variant, (2, 2 + variant))
    return replace(
        style, marker=_nth(_VARIANT_MARKERS, variant), hatch=_nth(_VARIANT_HATCHES, variant),
        marker_size=size, filled=False, dash=dash, width=1.2,
    )  # fmt: skip


def sweep_style(engine: str, variant: int = 0, source: str = MEASURED) -> EngineStyle:
    """Style of an engine where each point is a result of its own.

    Markers are filled, except those of published values. Stock's are the largest, and its line the
    widest, so that an engine that is as fast does not hide it.
    """
    style = engine_style(engine, variant)
    # A cross has no inside that could be hollow.
    marker = "D" if style.marker == "x" else style.marker
    filled = not SOURCE_STYLES[source].hollow
    stock = engine == "vanilla"
    size, width = (7.5, 3.0) if stock else (5.0, min(style.width, 1.8))
    return replace(style, marker=marker, marker_size=size, width=width, filled=filled)


def _nth(values: tuple[str, ...], variant: int) -> str:
    return values[(variant - 1) % len(values)]


def engine_order(engine: str) -> int:
    """Place of an engine in every figure: stock, asynchronous gradients, hybrid, others."""
    return list(ENGINES).index(engine) if engine in ENGINES else len(ENGINES)


def engine_title(engine: str, stride: float | None = None, source: str = MEASURED) -> str:
    """Name of an engine in a legend, with its stride and with its source unless measured."""
    name = ENGINES[engine].title if engine in ENGINES else engine or UNKNOWN_ENGINE.title
    # A stride that is unknown is NaN, and 0 is no stride.
    if engine == "hybrid" and stride is not None and stride > 0:
        name += f" (stride {stride:g})"
    return name if source == MEASURED else f"{name}, {source}"


def engine_tag(engine: str, stride: float | None = None) -> str:
    """Shortest name, for below a bar: the paper's ``V``, ``A`` and ``H`` with the stride."""
    letters = {"vanilla": "V", "async-gradients": "A", "hybrid": "H"}
    letter = letters.get(engine, "?")
    return f"{letter}{stride:g}" if letter == "H" and stride is not None and stride > 0 else letter
