"""What still fits into the time."""

from launch.fit.estimate import TimeLimit


class Clock:
    """Time that tests set."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_what_nothing_tells_of_is_tried_while_there_is_time():
    clock = Clock()
    limit = TimeLimit(10, clock)
    assert limit.refuse(0.0) == ""
    clock.now += 10
    assert limit.refuse(0.0) == "it takes about 0 s, and 0 s of --minutes are left"


def test_a_run_that_would_take_longer_than_what_is_left_is_refused():
    clock = Clock()
    limit = TimeLimit(100, clock)
    clock.now += 70
    assert limit.refuse(10) == ""
    assert limit.refuse(40) == "it takes about 40 s, and 30 s of --minutes are left"


def test_time_is_never_below_zero():
    clock = Clock()
    limit = TimeLimit(1, clock)
    clock.now += 5
    assert limit.left_s == 0
