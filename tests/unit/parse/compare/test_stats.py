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
    spread,
    student_t,
)

FEW = {"resamples": 300}


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
    assert ratio_of_medians(one, one, **FEW).covers == INSIDE_A_RUN
    assert ratio_of_medians(one, two, **FEW).covers == INSIDE_A_RUN
    assert ratio_of_medians(two, two, **FEW).covers == OVER_REPEATS
    few = ratio_of_medians([[1.0, 1.1, 1.2]], one)
    assert (few.low, few.high, few.covers) == (None, None, "")
    assert few.ratio == pytest.approx(1.1 / 1.15)


@pytest.mark.parametrize(("above", "below"), [([], [[1.0]]), ([[1.0]], [[]]), ([[1.0]], [[0.0]])])
def test_no_times_give_no_ratio(above, below):
    assert ratio_of_medians(above, below) is None


def test_paired_runs_come_in_twos():
    with pytest.raises(ValueError, match="in twos"):
        ratio_of_medians([[1.0], [2.0]], [[1.0]], paired=True)
    with pytest.raises(ValueError, match="in twos"):
        ratio_of_medians([[1.0], []], [[1.0], [2.0]], paired=True)


def test_what_slows_down_both_of_a_pair_cancels():
    rng = np.random.default_rng(5)
    drift = (1.0, 1.3, 0.8, 1.1)
    sides = [[list(base * d * rng.normal(1, 0.01, 9)) for d in drift] for base in (130, 100)]
    paired = ratio_of_medians(*sides, paired=True)
    unpaired = ratio_of_medians(*sides)
    assert paired.ratio == unpaired.ratio
    assert paired.high - paired.low < 0.4 * (unpaired.high - unpaired.low)


def test_repeats_that_differ_widen_the_interval():
    inside = [1.0, 1.01, 1.02, 0.99, 0.98]
    alike = [inside] * 3
    apart = [[t * f for t in inside] for f in (0.9, 1.0, 1.1)]
    narrow, wide = (ratio_of_medians(side, side, **FEW) for side in (alike, apart))
    assert wide.high - wide.low > 4 * (narrow.high - narrow.low)


def by_hand(above, below, paired, draws, seed):
    """The same bootstrap in plain Python: a second opinion."""
    generator = random.Random(seed)

    def iterations(times):
        block = max(1, round(len(times) ** (1 / 3)))
        drawn = []
        while len(drawn) < len(times):
            start = generator.randrange(len(times))
            drawn += [times[(start + k) % len(times)] for k in range(block)]
        return drawn[: len(times)]

    def pooled(side, chosen):
        return statistics.median([t for index in chosen for t in iterations(side[index])])

    ratios = []
    for _ in range(draws):
        chosen = [generator.randrange(len(above)) for _ in above]
        other = chosen if paired else [generator.randrange(len(below)) for _ in below]
        ratios.append(pooled(above, chosen) / pooled(below, other))
    return ratios


@pytest.mark.parametrize(("repeats", "lengths"), [(1, (9, 9)), (3, (9, 9)), (4, (9, 6))])
@pytest.mark.parametrize("paired", [False, True])
def test_the_bootstrap_agrees_with_a_second_implementation(repeats, lengths, paired):
    rng = np.random.default_rng(11)
    sides = [
        [list(rng.normal(mean, 4) + rng.normal(0, 3, lengths[r % 2])) for r in range(repeats)]
        for mean in (130.0, 100.0)
    ]
    fast = np.sort(bootstrap_ratios(*sides, paired, 4000, 1))
    slow = np.sort(by_hand(*sides, paired, 4000, 1))
    grid = np.concatenate([fast, slow])
    shares = [np.searchsorted(draws, grid * (1 + 1e-9)) / len(draws) for draws in (fast, slow)]
    # Two samples of one distribution differ by more once in a thousand (Kolmogorov and Smirnov).
    assert np.abs(shares[0] - shares[1]).max() < 1.95 * math.sqrt(2 / 4000)


@pytest.mark.parametrize(
    ("repeats", "between", "inside"), [(1, 0.0, 0.03), (3, 0.03, 0.03), (5, 0.1, 0.02)]
)
def test_a_95_percent_interval_holds_the_true_ratio_that_often(repeats, between, inside):
    rng = np.random.default_rng(repeats)

    def side(mean):
        levels = mean * np.exp(rng.normal(0, between, repeats))
        return [list(level * np.exp(rng.normal(0, inside, 9))) for level in levels]

    found = [ratio_of_medians(side(130.0), side(100.0), resamples=200) for _ in range(250)]
    assert 0.90 <= sum(r.low <= 1.3 <= r.high for r in found) / len(found) <= 0.99


def test_students_t():
    known = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 8: 2.306, 12: 2.179, 30: 2.042}
    for degrees, value in known.items():
        assert student_t(degrees) == pytest.approx(value, rel=0.003)
    assert math.isclose(student_t(10**9), 1.959964, rel_tol=1e-6)
