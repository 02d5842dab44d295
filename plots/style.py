"""Colour, hatch, dash and marker of every phase and engine, in one place.

Colours are Okabe and Ito's, which stay apart for colour-blind readers; hatches and dashes carry the
same distinction on grey paper.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

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
    """A line of a loss figure; wider lines are drawn first, so that equal ones show through."""

    title: str
    colour: str
    dash: str | tuple[int, tuple[int, ...]]
    marker: str
    width: float
    marker_size: float
    filled: bool = True


PHASES = {
    "forward": PhaseStyle("forward", "#56B4E9", "", "black"),
    "backward": PhaseStyle("backward", "#E69F00", "///", "black"),
    "update": PhaseStyle("update", "#009E73", "...", "black"),
    "other": PhaseStyle("outside the phases", "#FFFFFF", "", "black"),
}
ENGINES = {
    "vanilla": EngineStyle("ZeRO-3 offload (vanilla)", "#999999", "solid", "o", 4.5, 8.0),
    "async-gradients": EngineStyle("asynchronous gradients", "#0072B2", "solid", "s", 2.2, 4.5),
    "hybrid": EngineStyle("hybrid", "#D55E00", (0, (4, 3)), "x", 1.4, 5.0),
}
UNKNOWN_ENGINE = EngineStyle("unknown engine", "#CC79A7", (0, (1, 2)), "^", 1.4, 4.0)


_VARIANT_MARKERS = ("D", "^", "v", "P", "<", ">", "*")


def engine_style(engine: str, variant: int = 0) -> EngineStyle:
    """Style of an engine by its name in the tables.

    Args:
        engine: ``vanilla``, ``async-gradients``, ``hybrid``; others look alike.
        variant: Position among the runs of that engine in one panel; each has its own marker and,
            past the first, its own dash.
    """
    style = ENGINES.get(engine, UNKNOWN_ENGINE)
    if variant == 0:
        return style
    marker = _VARIANT_MARKERS[(variant - 1) % len(_VARIANT_MARKERS)]
    size, dash = 6.0 + 2.5 * variant, (2 * variant, (2, 2 + variant))
    return replace(style, marker=marker, marker_size=size, filled=False, dash=dash, width=1.2)
