import math
import random
import statistics

import numpy as np
import pytest

from parse.stats import (
    INSIDE_A_RUN,
    OVER_REPEATS,
    bootstrap_ratios,
    ratio_of_medians,
    reach_of_mean,
    spread,
)


def test_spread_over_several_repeats():
    found = spread([[1.0, 2.0, 3.0, 10.0], [], [4.0, 5.0]])
    values = [1.0, 2.0, 3.0, 10.0, 4.0, 5.0]
    first, middle, third = statistics.quantiles(values, n=4, method="inclusive")
    assert (found.median_ms, found.mean_ms) == (middle, statistics.fmean(values))
    assert found.iqr_ms == pytest.approx(third - first)
    assert (found.iterations, found.repeats) == (6, 2)
    assert spread([[], []]) is None


def test_the_same_times_and_seed_give_the_same_interval():
    rng = np.random.default_rng(3)
    times = [list(rng.normal(1, 0.1, 20))], [list(rng.normal(2, 0.1, 20))]
    first, again, other = (ratio_of_medians(*times, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    assert first.ratio == pytest.approx(statistics.median(*times[0]) / statistics.median(*times[1]))


def test_an_interval_says_what_it_covers():
    one, two = [[1.0, 1.1, 1.2, 1.3]], [[1.0, 1.1, 1.2], [1.1, 1.2, 1.3]]
    assert ratio_of_medians(one, one).covers == INSIDE_A_RUN
    assert ratio_of_medians(one, two).covers == INSIDE_A_RUN
    assert ratio_of_medians(two, two).covers == OVER_REPEATS
    few = ratio_of_medians([[1.0, 1.1, 1.2]], one)
    assert (few.low, few.high, few.covers) == (None, None, "")
    assert few.ratio == pytest.approx(1.1 / 1.15)


@pytest.mark.parametrize(("above", "below"), [([], [[1.0]]), ([[1.0]], [[]]), ([[1.0]], [[0.0]])])
def test_no_times_give_no_ratio(above, below):
    assert ratio_of_medians(above, below) is None


@pytest.mark.parametrize("sides", [([[1.0], [2.0]], [[1.0]]), ([[1.0], []], [[1.0], [2.0]])])
def test_paired_runs_come_in_twos(sides):
    with pytest.raises(ValueError, match="in twos"):
        ratio_of_medians(*sides, paired=True)


def test_what_slows_down_both_of_a_pair_cancels():
    rng = np.random.default_rng(5)
    drift = (1.0, 1.3, 0.8, 1.1)
    sides = [[list(base * d * rng.normal(1, 0.01, 9)) for d in drift] for base in (130, 100)]
    paired, unpaired = (ratio_of_medians(*sides, paired=pairs) for pairs in (True, False))
    assert paired.ratio == unpaired.ratio
    assert paired.high - paired.low < 0.4 * (unpaired.high - unpaired.low)


def test_the_bootstrap_agrees_with_a_second_implementation():
    rng, generator = np.random.default_rng(11), random.Random(1)
    sides = [[rng.normal(mean, 4, length) for length in (9, 6)] for mean in (130.0, 100.0)]

    def iterations(times):
        block, drawn = max(1, round(len(times) ** (1 / 3))), []
        while len(drawn) < len(times):
            start = generator.randrange(len(times))
            drawn += [times[(start + k) % len(times)] for k in range(block)]
        return drawn[: len(times)]

    def by_hand():
        above, below = (
            statistics.median([t for times in side for t in iterations(times)]) for side in sides
        )
        return above / below

    fast = np.sort(bootstrap_ratios(*sides, 4000, 1))
    slow = np.sort([by_hand() for _ in range(4000)])
    grid = np.concatenate([fast, slow])
    shares = [np.searchsorted(draws, grid * (1 + 1e-9)) / len(draws) for draws in (fast, slow)]
    # Two samples of one distribution differ by more once in a thousand (Kolmogorov and Smirnov).
    assert np.abs(shares[0] - shares[1]).max() < 1.95 * math.sqrt(2 / 4000)


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize(
    ("repeats", "between", "inside"), [(1, 0.0, 0.03), (3, 0.03, 0.03), (5, 0.1, 0.02)]
)
def test_a_95_percent_interval_holds_the_true_ratio_that_often(repeats, between, inside, paired):
    rng = np.random.default_rng(repeats)

    def side(mean):
        levels = mean * np.exp(rng.normal(0, between, repeats))
        return [list(level * np.exp(rng.normal(0, inside, 9))) for level in levels]

    sides = [(side(130.0), side(100.0)) for _ in range(250)]
    found = [ratio_of_medians(*both, paired=paired, resamples=200) for both in sides]
    assert 0.90 <= sum(r.low <= 1.3 <= r.high for r in found) / len(found) <= 0.99


def test_the_interval_of_a_mean_is_students():
    # Standard errors by hand, and the tabled quantiles of 2 and of Welch's 2.04 degrees.
    assert reach_of_mean([[0.01, 0.02, 0.03]], 0.95) == pytest.approx(4.303 * 0.0057735, rel=1e-3)
    both = [[2.9, 3.0, 3.1], [2.99, 3.0, 3.01]]
    assert reach_of_mean(both, 0.95) == pytest.approx(0.245, abs=5e-4)
    assert reach_of_mean([[1.0, 1.0]], 0.95) == 0.0
    assert math.isinf(reach_of_mean([[1.0]], 0.95))
