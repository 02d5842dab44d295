"""Spread of a phase's times, and an interval for the ratio of two medians.

Times are given as repeats: one list a run, each its iterations after the warm-up, in ms. The
interval is a percentile bootstrap of the ratio of medians. With several repeats it is hierarchical:
repeats are drawn with replacement, then iterations within each; repeats of two engines that
alternated are drawn together, so that what slowed down both cancels. With one repeat there is
nothing but its iterations to draw from, and the interval says nothing of the next run.

Few repeats show too little of their own spread. So what the interval reaches further than one of
iterations alone is widened by Student's t over the normal quantile, as a t interval is; on a
logarithmic scale, where the ratio and its inverse are alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

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
"""What variation an interval covers."""
_NORMAL_QUANTILE = 1.959964


@dataclass(frozen=True)
class Spread:
    """Statistics of all iterations of all repeats, in ms."""

    median_ms: float
    first_quartile_ms: float
    third_quartile_ms: float
    mean_ms: float
    iterations: int
    repeats: int

    @property
    def iqr_ms(self) -> float:
        """Distance between the quartiles."""
        return self.third_quartile_ms - self.first_quartile_ms


@dataclass(frozen=True)
class Ratio:
    """A ratio of medians with its interval."""

    ratio: float
    low: float | None
    """Lower end; None with the upper one where there are too few iterations."""
    high: float | None
    paired: bool
    """Whether repeats were drawn in pairs."""
    covers: str
    """``repeats``, ``inside a run``, or empty without an interval."""


def spread(repeats: Repeats) -> Spread | None:
    """Statistics of a phase; None without a single time."""
    kept = _kept(repeats)
    if not kept:
        return None
    values = np.concatenate(kept)
    first, middle, third = (float(q) for q in np.quantile(values, (0.25, 0.5, 0.75)))
    return Spread(middle, first, third, float(values.mean()), len(values), len(kept))


def ratio_of_medians(
    numerator: Repeats,
    denominator: Repeats,
    *,
    paired: bool = False,
    resamples: int = RESAMPLES,
    seed: int = SEED,
) -> Ratio | None:
    """The median of one set of runs over that of another, with a 95% interval.

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
    inside = _reach(ratio, bootstrap_ratios(above, below, None, resamples, seed))
    if repeats == 1:
        reach = inside * _widening_inside(above, below)
    else:
        total = _reach(ratio, bootstrap_ratios(above, below, paired, resamples, seed))
        between = np.sqrt(np.maximum(total**2 - inside**2, 0.0))
        runs = len(above) + len(below)
        widening = student_t(repeats - 1 if paired else runs - 2) / _NORMAL_QUANTILE
        reach = np.hypot(inside, widening * between)
    low, high = ratio * math.exp(-reach[0]), ratio * math.exp(reach[1])
    return Ratio(ratio, low, high, paired, OVER_REPEATS if repeats > 1 else INSIDE_A_RUN)


def bootstrap_ratios(
    numerator: Repeats, denominator: Repeats, paired: bool | None, resamples: int, seed: int
) -> _Floats:
    """Ratios of medians of resampled runs.

    Args:
        numerator: Runs with a time each at least.
        denominator: As many where ``paired``.
        paired: Whether both sides draw the same runs; None draws iterations of every run alone.
        resamples: Length of the result.
        seed: Of the generator.

    Returns:
        (resamples,) ratios; not finite where a resampled median is 0.
    """
    generator = np.random.default_rng(seed)
    above, below = _kept(numerator), _kept(denominator)
    chosen, other = (np.tile(np.arange(len(side)), (resamples, 1)) for side in (above, below))
    if paired is not None:
        chosen = generator.integers(len(above), size=chosen.shape)
        other = chosen if paired else generator.integers(len(below), size=other.shape)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios: _Floats = _medians(above, chosen, generator) / _medians(below, other, generator)
    return ratios


def student_t(degrees: int) -> float:
    """The 97.5% quantile of Student's t."""
    # Imported here: SciPy takes longer to load than most tables take to write.
    from scipy.special import stdtrit

    return float(stdtrit(degrees, (1 + LEVEL) / 2))


def _kept(repeats: Repeats) -> list[_Floats]:
    """Runs that have a time."""
    return [np.asarray(times, dtype=np.float64) for times in repeats if len(times)]


def _medians(
    repeats: Sequence[_Floats], chosen: npt.NDArray[np.int64], generator: np.random.Generator
) -> _Floats:
    """Median of each row's runs, their iterations drawn anew; ``chosen`` is (rows, runs).

    A run's iterations are drawn in blocks of neighbours around a ring: neighbours resemble each
    other, and single draws would tear them apart and make the interval too narrow.
    """
    lengths = np.array([len(times) for times in repeats])
    times = np.full((len(repeats), lengths.max()), np.inf)
    for run, own in enumerate(repeats):
        times[run, : len(own)] = own
    drawn = np.full((*chosen.shape, lengths.max()), np.inf)
    for length in np.unique(lengths):
        here = lengths[chosen] == length
        runs, block = chosen[here], max(1, round(length ** (1 / 3)))
        starts = generator.integers(length, size=(len(runs), math.ceil(length / block)))
        places = (starts[..., np.newaxis] + np.arange(block)) % length
        places = places.reshape(len(runs), -1)[:, :length]
        drawn[here, :length] = times[runs[:, np.newaxis], places]
    drawn = np.sort(drawn.reshape(len(chosen), -1), axis=1)
    counts = lengths[chosen].sum(axis=1)
    middles = np.stack(((counts - 1) // 2, counts // 2), axis=1)
    medians: _Floats = np.take_along_axis(drawn, middles, axis=1).mean(axis=1)
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
    return missing * student_t(sum(sides) - 2) / _NORMAL_QUANTILE
