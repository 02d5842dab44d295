"""Spread of a phase's times, and an interval for the ratio of two medians.

Times are given as repeats: one list a run, each its iterations after the warm-up, in ms. With
several repeats of both sides the interval is Student's, of the logarithms of their medians: of the
differences of repeats that alternated, so that what slowed down both cancels, or else Welch's of
two means. With one repeat there is nothing but its iterations to draw from: there the interval is a
percentile bootstrap of the ratio, and says nothing of the next run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import variance

import numpy as np
import numpy.typing as npt

_Floats = npt.NDArray[np.float64]
Repeats = Sequence[Sequence[float]] | Sequence[_Floats]
"""Times of several runs of one point: one sequence a run, in ms."""

LEVEL = 0.95
"""How often the interval is meant to hold the true ratio."""
RESAMPLES = 2000
SEED = 20241202
MINIMUM_ITERATIONS = 4
"""Iterations of a side below which an interval would be an invention."""

OVER_REPEATS, INSIDE_A_RUN = "repeats", "inside a run"
"""The variation that an interval covers."""
_NORMAL_QUANTILE = 1.959964


@dataclass(frozen=True)
class Spread:
    """Statistics of all iterations of all repeats, in ms."""

    median_ms: float
    iqr_ms: float
    """Distance between the quartiles."""
    mean_ms: float
    iterations: int
    repeats: int


@dataclass(frozen=True)
class Ratio:
    """A ratio of medians with its interval."""

    ratio: float
    low: float | None
    """Lower end; None with the upper one where there are too few iterations."""
    high: float | None
    paired: bool
    """True where the same repeats of both sides were compared with each other."""
    covers: str
    """``repeats``, ``inside a run``, or empty without an interval."""


def spread(repeats: Repeats) -> Spread | None:
    """Return statistics of a phase; None without a single time."""
    kept = _kept(repeats)
    if not kept:
        return None
    values = np.concatenate(kept)
    first, middle, third = (float(q) for q in np.quantile(values, (0.25, 0.5, 0.75)))
    return Spread(middle, third - first, float(values.mean()), len(values), len(kept))


def ratio_of_medians(
    numerator: Repeats,
    denominator: Repeats,
    *,
    paired: bool = False,
    resamples: int = RESAMPLES,
    seed: int = SEED,
) -> Ratio | None:
    """Return the median of one set of runs over that of another, with a 95% interval.

    Args:
        numerator: Times above the line: those of the reference, for a speed-up.
        denominator: Times below it.
        paired: Whether the n-th runs of both alternated; then both need as many.
        resamples: Draws of the bootstrap.
        seed: The same times and seed give the same interval.

    Returns:
        None where a side has no time, or a median of 0.

    Raises:
        ValueError: ``paired`` with unequal numbers of runs, or with a run that has no times.
    """
    if paired and (
        len(numerator) != len(denominator) or not all(map(len, (*numerator, *denominator)))
    ):
        raise ValueError("paired runs come in twos, each with times")
    above, below = _kept(numerator), _kept(denominator)
    if not above or not below or not (bottom := float(np.median(np.concatenate(below)))) > 0:
        return None
    ratio = float(np.median(np.concatenate(above))) / bottom
    repeats = min(len(above), len(below))
    paired = paired and repeats > 1
    if ratio <= 0 or min(sum(map(len, above)), sum(map(len, below))) < MINIMUM_ITERATIONS:
        return Ratio(ratio, None, None, paired, "")
    if repeats > 1:
        logs = [[math.log(np.median(times)) for times in side] for side in (above, below)]
        samples = [[a - b for a, b in zip(*logs, strict=True)]] if paired else logs
        reach = np.full(2, reach_of_mean(samples, LEVEL))
    else:
        reach = _reach(ratio, bootstrap_ratios(above, below, resamples, seed))
        reach *= _widening_inside(above, below)
    low, high = ratio * math.exp(-reach[0]), ratio * math.exp(reach[1])
    return Ratio(ratio, low, high, paired, OVER_REPEATS if repeats > 1 else INSIDE_A_RUN)


def reach_of_mean(samples: Sequence[Sequence[float]], confidence: float) -> float:
    """Return half the width of the interval of a mean, or by Welch of the difference of two."""
    if any(len(sample) < 2 for sample in samples):
        return math.inf  # one value says nothing of how far the next one is
    parts = [variance(sample) / len(sample) for sample in samples]
    if not sum(parts):
        return 0.0
    freedom = [p**2 / (len(s) - 1) for p, s in zip(parts, samples, strict=True)]
    return student_t(sum(parts) ** 2 / sum(freedom), confidence) * math.sqrt(sum(parts))


def student_t(degrees: float, confidence: float) -> float:
    """Return the two-sided quantile of Student's t."""
    # Imported here: SciPy takes longer to load than most tables take to write.
    from scipy.special import stdtrit

    return float(stdtrit(degrees, (1 + confidence) / 2))


def bootstrap_ratios(
    above: Sequence[_Floats], below: Sequence[_Floats], resamples: int, seed: int
) -> _Floats:
    """Return (resamples,) ratios of medians of runs whose iterations are drawn anew.

    They are not finite where a median is 0.
    """
    generator = np.random.default_rng(seed)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios: _Floats = _medians(above, resamples, generator) / _medians(
            below, resamples, generator
        )
    return ratios


def _kept(repeats: Repeats) -> list[_Floats]:
    """Runs that have a time."""
    return [np.asarray(times, dtype=np.float64) for times in repeats if len(times)]


def _medians(runs: Sequence[_Floats], resamples: int, generator: np.random.Generator) -> _Floats:
    """Median of the iterations of all runs, (resamples,).

    A run's iterations are drawn in blocks of neighbours around a ring: neighbours resemble each
    other, and single draws would tear them apart and make the interval too narrow.
    """
    drawn = []
    for times in runs:
        length = len(times)
        block = max(1, round(length ** (1 / 3)))
        starts = generator.integers(length, size=(resamples, math.ceil(length / block)))
        places = (starts[..., np.newaxis] + np.arange(block)) % length
        drawn.append(times[places.reshape(resamples, -1)[:, :length]])
    medians: _Floats = np.median(np.concatenate(drawn, axis=1), axis=1)
    return medians


def _reach(ratio: float, draws: _Floats) -> _Floats:
    """How far the draws reach below and above the ratio, (2,), both at least 0, as logarithms."""
    tail = (1 - LEVEL) / 2
    usable = draws[np.isfinite(draws) & (draws > 0)]
    low, high = np.quantile(np.log(usable), (tail, 1 - tail))
    centre = math.log(ratio)
    return np.maximum((centre - low, high - centre), 0.0)


def _widening_inside(above: Sequence[_Floats], below: Sequence[_Floats]) -> float:
    """How much further than the draws an interval of few iterations has to reach, at least 1."""
    sides = [sum(map(len, side)) for side in (above, below)]
    missing = math.sqrt(min(sides) / (min(sides) - 1))
    return missing * student_t(sum(sides) - 2, LEVEL) / _NORMAL_QUANTILE
