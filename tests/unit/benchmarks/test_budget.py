"""What still fits into the time."""

from benchmarks.budget import Budget


class Clock:
    """Time that tests set."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_nothing_known_fits_while_there_is_time():
    clock = Clock()
    budget = Budget(10, clock)
    assert budget.fits("stock")
    clock.now += 10
    assert not budget.fits("stock")
    assert budget.left_s == 0


def test_what_took_too_long_before_does_not_fit_again():
    clock = Clock()
    budget = Budget(100, clock)
    budget.took("stock", 40)
    budget.took("ours", 10)
    clock.now += 70
    assert not budget.fits("stock")
    assert budget.fits("ours")


def test_the_unknown_is_guessed_as_the_longest_known():
    clock = Clock()
    budget = Budget(50, clock)
    budget.took("stock", 40)
    budget.took("ours", 10)
    clock.now += 15
    assert not budget.fits("zenflow")


def test_the_longest_of_several_times_counts():
    budget = Budget(100, Clock())
    budget.took("stock", 40)
    budget.took("stock", 20)
    assert budget.guess_s("stock") == 40


def test_time_is_never_below_zero():
    clock = Clock()
    budget = Budget(1, clock)
    clock.now += 5
    assert budget.left_s == 0
