"""What holds of every interval, whatever the times."""

import pytest
from hypothesis import given, settings, strategies as st

from parse.stats import ratio_of_medians

TIMES = st.lists(st.floats(0.01, 1e6), min_size=1, max_size=12)
REPEATS = st.lists(TIMES, min_size=1, max_size=4)


@settings(max_examples=60, deadline=None)
@given(REPEATS, REPEATS)
def test_the_ratio_lies_in_its_interval(above, below):
    found = ratio_of_medians(above, below, resamples=100)
    if found.low is not None:
        assert 0 < found.low <= found.ratio * (1 + 1e-12)
        assert found.ratio <= found.high * (1 + 1e-12)


@settings(max_examples=40, deadline=None)
@given(REPEATS, REPEATS, st.sampled_from((0.5, 2.0, 1024.0)))
def test_the_unit_does_not_matter(above, below, factor):
    first = ratio_of_medians(above, below, resamples=100)
    scaled = [[[t * factor for t in times] for times in side] for side in (above, below)]
    again = ratio_of_medians(*scaled, resamples=100)
    assert again.ratio == pytest.approx(first.ratio)
    if first.low is not None:
        assert (again.low, again.high) == (pytest.approx(first.low), pytest.approx(first.high))
