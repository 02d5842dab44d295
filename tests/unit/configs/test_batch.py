"""Batches that do not fit together, and remedies that do."""

import re

import pytest
from hypothesis import given, strategies as st

from configs.batch import batch_problem
from configs.errors import ConfigError
from configs.study import load_study

SIZES = st.integers(1, 64)


@given(st.integers(1, 512), SIZES, SIZES)
def test_every_remedy_fits(batch, micro, ranks):
    problem = batch_problem(batch, micro, ranks)
    assert bool(problem) == bool(batch % (micro * ranks))
    remedies = problem.partition("; give ")[2]
    own = {"global_batch_size": batch, "micro_batch_size": micro, "dp": ranks}
    for remedy in re.findall(r"(?:(\w+) )?(\d+) \(accumulation (\d+)\)", remedies):
        field = remedy[0] if remedy[0] in own else "global_batch_size"
        changed = {**own, field: int(remedy[1])}
        product = changed["micro_batch_size"] * changed["dp"] * int(remedy[2])
        assert changed["global_batch_size"] == product, remedy
    assert not problem or "global_batch_size" in remedies


@given(st.integers(1, 512), SIZES, SIZES)
def test_each_of_the_three_is_offered_where_it_alone_can_do(batch, micro, ranks):
    remedies = batch_problem(batch, micro, ranks).partition("; give ")[2]
    if remedies:
        assert ("micro_batch_size" in remedies) == (batch % ranks == 0)
        assert ("dp " in remedies) == (batch % micro == 0)


def test_a_batch_below_one_micro_batch_names_the_smallest_that_is_enough():
    problem = batch_problem(2, 2, 4)
    assert problem == (
        "global_batch_size 2 is not a multiple of micro_batch_size 2 x dp 4 = 8; give "
        "global_batch_size 8 (accumulation 1), or dp 1 (accumulation 1)"
    )


def test_a_point_says_the_problem():
    study = load_study("zero-ladder")
    with pytest.raises(ConfigError, match=r"global_batch_size 6 .* give global_batch_size 4 \("):
        study.make_point({"model": "tiny", "micro_batch_size": 2, "dp": 2, "global_batch_size": 6})
    with pytest.raises(ConfigError, match=r"'micro_batch_size' = 0: .*greater than 0"):
        study.make_point({"model": "tiny", "micro_batch_size": 0})
