"""Looks of engines, phases and sources: as the study says, the rest from lists of our own.

Colours stay apart for colour-blind readers; hatches, dashes and markers carry the same distinction
on grey paper.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from configs.naming import Fields, Namer
from configs.sources import MEASURED, PUBLISHED, SIMULATED
from configs.study import Phase, Study, Style

STYLE_FILE = Path(__file__).resolve().parent / "paper.mplstyle"


@dataclass(frozen=True)
class SourceStyle:
    """Marks of numbers that were not measured here."""

    hollow: bool
    """Markers and bars without a fill."""
    watermark: str
    """Written across the axes; empty for none."""
    alpha: float
    """Opacity of lines and of bars."""


SOURCE_STYLES = {
    MEASURED: SourceStyle(hollow=False, watermark="", alpha=1.0),
    SIMULATED: SourceStyle(hollow=False, watermark="simulated", alpha=0.55),
    PUBLISHED: SourceStyle(hollow=True, watermark="", alpha=1.0),
}
REST = ""
"""Stands for what of an iteration no phase covers, after the phases of the study."""
_REST_PHASE = Phase(title="outside the phases", colour="#FFFFFF")

_CHOICES = {
    "colour": (
        *("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#332288"),
        *("#117733", "#882255", "#999933", "#44AA99", "#AA4499", "#999999", "#661100"),
    ),
    "marker": ("o", "s", "D", "^", "p", "P", "*", "v", "<", ">", "h", "d"),
    "hatch": (
        *("", "///", "\\\\\\", "xxx", "...", "--", "oo", "||", "++", "**", "OO", "//--", "xx||"),
    ),
}
"""Taken in turn by engines whose rows leave it open; markers and hatches also by the values of
their own fields; markers all have an inside to fill."""
_UNKNOWN = Style(
    colour="#000000", dash=(0, (1, 2)), marker="h", width=1.4, marker_size=4, hatch="++"
)
_REFERENCE_WIDTH, _REFERENCE_MARKER = 4.5, 8.0


@dataclass(frozen=True, order=True)
class Look:
    """An engine with certain values of its own fields: its names, and how it is drawn.

    Looks sort as figures show them, and are equal where engine and values are.
    """

    key: tuple[Any, ...]
    name: str = field(compare=False)
    """As in tables and reports."""
    style: Style = field(compare=False)
    is_reference: bool = field(compare=False)
    variant: int = field(compare=False)
    """Place among those of its engine, so that panels agree in their markers."""

    def title(self, source: str = MEASURED) -> str:
        """Entry of a legend, with the source unless measured."""
        return self.name if source == MEASURED else f"{self.name}, {source}"

    @property
    def alone(self) -> Style:
        """Return the style of a point that is a result of its own.

        The reference's markers are the largest, and its line the widest, so that an engine that is
        as fast does not hide it.
        """
        size, width = (7.5, 3.0) if self.is_reference else (5.0, min(self.style.width, 1.8))
        # A cross has no inside that could be hollow.
        marker = "D" if self.style.marker == "x" else self.style.marker
        return self.style.model_copy(update={"marker_size": size, "width": width, "marker": marker})


class Looks:
    """Looks of the engines of a study that some rows hold."""

    def __init__(self, study: Study, rows: Sequence[Fields]) -> None:
        self._study = study
        self._namer = Namer(study)
        self._present = {str(row.get("engine")) for row in rows}
        keys = sorted({self._namer.engine_key(row) for row in rows})
        groups = itertools.groupby(keys, key=lambda key: key[:2])
        self._places = {key: place for _, group in groups for place, key in enumerate(group)}

    def of(self, row: Fields) -> Look:
        """The look of a run."""
        key = self._namer.engine_key(row)
        engine, variant = str(row.get("engine")), self._places[key]
        is_reference = engine == self._study.reference
        return Look(
            key, self._namer.engine(row), self._style(engine, variant), is_reference, variant
        )

    def _style(self, engine: str, variant: int) -> Style:
        """Style of an engine; each variant past the first has a marker, hatch and dash of its own.

        Variants pass over the markers and hatches of the other engines that are shown.
        """
        style = self._styles.get(engine, _UNKNOWN)
        if variant == 0:
            return style
        shown = [self._styles.get(name, _UNKNOWN) for name in self._present]
        # A bar that stands alone has no hatch, and a cross that stands alone is drawn as a diamond
        # ("D"): a variant must look otherwise.
        taken = {"marker": {"D"}, "hatch": {""}}
        own = {
            name: next(itertools.islice(_unused(name, shown, also), variant - 1, None))
            for name, also in taken.items()
        }
        dash = (2 * variant, (2, 2 + variant))
        return style.model_copy(
            update={**own, "dash": dash, "width": 1.2, "marker_size": 7.0 + 1.5 * variant}
        )

    @cached_property
    def _styles(self) -> dict[str, Style]:
        """The rows' own styles, what they leave open filled in."""
        engines = {name: row.style for name, row in self._study.engines.items()}
        rest = {name: _unused(name, engines.values(), set()) for name in _CHOICES}
        found = {}
        for name, style in engines.items():
            empty = {key: next(more) for key, more in rest.items() if not getattr(style, key)}
            found[name] = style.model_copy(update=empty)
        # Lines over each other: the reference has to show through.
        first = found[self._study.reference]
        wide = {
            "width": max(first.width, _REFERENCE_WIDTH),
            "marker_size": max(first.marker_size, _REFERENCE_MARKER),
        }
        return {**found, self._study.reference: first.model_copy(update=wide)}


def _unused(name: str, styles: Iterable[Style], also: Set[str]) -> itertools.cycle[str]:
    """Markers, hatches or colours in turn that some styles do not have, nor those of ``also``."""
    taken = {value for style in styles if (value := getattr(style, name))} | also
    choices = _CHOICES[name]
    return itertools.cycle([choice for choice in choices if choice not in taken] or choices)


def phase_styles(study: Study) -> Mapping[str, Phase]:
    """Phases in the order they run, and last what none of them covers."""
    return {**study.phases, REST: _REST_PHASE}
