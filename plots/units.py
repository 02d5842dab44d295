"""Quantities that figures show, with their units, and numbers as short text."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass

from configs.study import Study
from deep_optimizer_states.units import GIB


@dataclass(frozen=True)
class Scale:
    """A unit and what to divide by to get it."""

    unit: str
    divisor: float


@dataclass(frozen=True)
class Quantity:
    """Something that iterations or whole runs have."""

    column: str
    """Name of the observations' column; see :mod:`plots.data`."""
    title: str
    scales: tuple[Scale, ...]
    """Smallest unit first; the largest that leaves numbers of 2 or more is taken."""

    def scale(self, values: Iterable[float]) -> Scale:
        """Return the unit that fits the largest of some values."""
        largest = max((abs(v) for v in values if math.isfinite(v)), default=0.0)
        fitting = [scale for scale in self.scales if largest >= 2 * scale.divisor]
        return fitting[-1] if fitting else self.scales[0]

    def label(self, scale: Scale, measured: bool = True) -> str:
        """Return an axis' text: ``median iteration time (ms)``, in several lines where long.

        Args:
            scale: Unit of the axis.
            measured: Whether it shows medians of measured iterations.
        """
        title = f"median {self.title}" if measured else self.title
        if not scale.unit:
            return "\n".join(textwrap.wrap(title, 24))
        if len(title + scale.unit) <= 24:
            return f"{title} ({scale.unit})"
        return "\n".join([*textwrap.wrap(title, 18), f"({scale.unit})"])


_TIME = (Scale("ms", 1.0), Scale("s", 1e3))
_GIB = (Scale("GiB", 1.0),)
ITERATION = Quantity("iteration_ms", "iteration time", _TIME)
UPDATE_RATE = Quantity(
    "update_rate",
    "update throughput",
    (
        Scale("parameters/s", 1.0),
        Scale("thousand parameters/s", 1e3),
        Scale("million parameters/s", 1e6),
        Scale("billion parameters/s", 1e9),
    ),
)
TOTAL = Quantity(
    "iteration_ms",
    "100 iterations",
    (Scale("ms", 0.01), Scale("s", 10.0), Scale("min", 600.0)),
)
_KNOWN = {
    known.column: known
    for known in (
        ITERATION,
        UPDATE_RATE,
        Quantity(
            "tflops", "throughput of a device", (Scale("GFLOP/s", 1e-3), Scale("TFLOP/s", 1.0))
        ),
        Quantity("samples_per_s", "throughput", (Scale("samples/s", 1.0),)),
        Quantity("max_allocated_gib", "peak of a rank's device, by DeepSpeed", _GIB),
        Quantity("host_peak_gib", "peak host memory of the run", _GIB),
        Quantity("gpu_peak_gib", "peak memory of the fullest GPU", _GIB),
        Quantity("reserved_peak_gib", "peak address space of a rank", _GIB),
    )
}
_ENDINGS = {
    "_ms": _TIME,
    "_gb_per_s": (Scale("MB/s", 1e-3), Scale("GB/s", 1.0)),
    "_per_s": (Scale("1/s", 1.0),),
    "_s": (Scale("s", 1.0),),
    "_percent": (Scale("%", 1.0),),
    "_gib": _GIB,
    "_mib": (Scale("MiB", 1.0), Scale("GiB", 1024.0)),
    "_bytes": (Scale("bytes", 1.0), Scale("MiB", 2.0**20), Scale("GiB", GIB)),
}
"""Units of columns that are not known by their names."""


def quantity(column: str, study: Study) -> Quantity:
    """Return what a column of the tables holds; its unit is the end of its name."""
    if column in _KNOWN:
        return _KNOWN[column]
    ending = next((ending for ending in _ENDINGS if column.endswith(ending)), "")
    stem = column.removesuffix(ending)
    result = study.results.get(column)
    title = result.title if result else stem.replace("_", " ")
    if ending == "_ms":
        title = f"{study.phases[stem].title if stem in study.phases else title} time"
    return Quantity(column, title, _ENDINGS.get(ending, (Scale("", 1.0),)))


def short(value: float) -> str:
    """Return three digits, or all before the point: no more than a figure can show."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
