import math

from hypothesis import given, strategies as st

from configs.fields import count
from plots.canvas import fold
from plots.units import ITERATION, TOTAL, UPDATE_RATE, short

POSITIVE = st.floats(1e-6, 1e15)
WORDS = st.lists(st.text("abc- ", min_size=1, max_size=30), min_size=1, max_size=8)


@given(WORDS, st.integers(4, 60))
def test_folding_keeps_every_word_and_the_width(parts, width):
    text = ", ".join(parts)
    folded = fold(text, width)
    assert sorted(folded.replace(",", "").replace("\n", "").replace(" ", "")) == sorted(
        text.replace(",", "").replace(" ", "")
    )
    assert all(len(line) <= width for line in folded.split("\n") if line.strip())


@given(st.lists(POSITIVE | st.just(math.nan)), st.sampled_from([ITERATION, UPDATE_RATE, TOTAL]))
def test_the_unit_leaves_the_largest_number_readable(values, quantity):
    scale = quantity.scale(values)
    assert scale in quantity.scales
    largest = max((v for v in values if not math.isnan(v)), default=0.0)
    assert largest / scale.divisor >= 2 or scale is quantity.scales[0]


@given(st.floats(0.1, 99.9) | st.floats(100, 1e9))
def test_a_short_number_is_off_by_less_than_a_percent(value):
    assert math.isclose(float(short(value)), value, rel_tol=0.006)


@given(st.integers(1, 9999), st.integers(0, 9))
def test_a_count_of_elements_reads_back(digits, zeros):
    text = count(float(digits * 10**zeros))
    factor = {"B": 1e9, "M": 1e6, "k": 1e3}.get(text[-1], 1.0)
    assert math.isclose(float(text.rstrip("BMk")) * factor, digits * 10**zeros, rel_tol=1e-9)
