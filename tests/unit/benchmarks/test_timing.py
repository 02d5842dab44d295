"""Times taken in turns, and what is made of them."""

import pytest

from benchmarks.timing import Times, in_turns


def test_few_repeats_show_their_range():
    assert Times((3.0, 1.0)).quartiles_s == (1.0, 3.0)


def test_a_ratio_is_taken_turn_by_turn():
    # The machine slowed down after the first turn: medians alone would say 10.
    slow, fast = Times((2.0, 20.0, 20.0)), Times((1.0, 10.0, 2.0))
    assert slow.ratios_to(fast).seconds == (2.0, 2.0, 10.0)
    assert slow.ratio_to(fast) == 2.0


def test_a_ratio_needs_equal_turns():
    with pytest.raises(ValueError, match="shorter"):
        Times((1.0, 2.0)).ratio_to(Times((1.0,)))


def test_alternatives_take_turns_after_one_that_does_not_count():
    done = []
    times = in_turns({"a": lambda: done.append("a"), "b": lambda: done.append("b")}, 3)
    assert done == ["a", "b"] * 4
    assert {name: len(t.seconds) for name, t in times.items()} == {"a": 3, "b": 3}
