"""Quantities that figures show, with their units, and numbers as short text."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

GIB = 2.0**30


@dataclass(frozen=True)
class Scale:
    """A unit and what to divide by to get it."""

    unit: str
    divisor: float


@dataclass(frozen=True)
class Quantity:
    """Something measured of every iteration."""

    column: str
    """Of the observations; see :mod:`plots.observations`."""
    title: str
    scales: tuple[Scale, ...]
    """Smallest unit first; the largest that leaves numbers of 2 or more is taken."""

    def scale(self, values: Iterable[float]) -> Scale:
        """The unit that fits the largest of some values."""
        largest = max((abs(v) for v in values if math.isfinite(v)), default=0.0)
        fitting = [scale for scale in self.scales if largest >= 2 * scale.divisor]
        return fitting[-1] if fitting else self.scales[0]

    def label(self, scale: Scale) -> str:
        """Text of an axis: ``iteration time (ms)``, in two lines where the unit is long."""
        return f"{self.title}{chr(10) if len(self.title + scale.unit) > 24 else ' '}({scale.unit})"


_TIME = (Scale("ms", 1.0), Scale("s", 1e3))
ITERATION = Quantity("iteration_ms", "iteration time", _TIME)
UPDATE = Quantity("update_ms", "update time", _TIME)
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
TFLOPS = Quantity(
    "tflops", "throughput of a device", (Scale("GFLOP/s", 1e-3), Scale("TFLOP/s", 1.0))
)
SAMPLES = Quantity("samples_per_s", "throughput", (Scale("samples/s", 1.0),))
TOTAL = Quantity(
    "iteration_ms", "100 iterations", (Scale("ms", 1.0), Scale("s", 1e3), Scale("min", 6e4))
)


def short(value: float) -> str:
    """Three digits, or all before the point: no more than a figure can show."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def count(number: float) -> str:
    """A number of elements with its magnitude: ``10M``, ``1.5B``."""
    for divisor, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= divisor:
            return f"{number / divisor:.4g}{letter}"
    return f"{number:g}"
