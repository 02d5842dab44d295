import os
import signal

import pytest

from dataset.files import DatasetError
from dataset.pool import ITEMS_PER_WORKER, ordered


def double(number):
    return 2 * number


def die(number):
    if number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def fail(number):
    raise DatasetError(f"bad {number}")


def test_results_come_in_order_and_items_are_drawn_as_needed():
    drawn = []

    def items():
        for number in range(20):
            drawn.append(number)
            yield number

    results = ordered(double, items(), 1)
    assert next(results) == 0
    assert len(drawn) == ITEMS_PER_WORKER
    assert list(results) == [2 * number for number in range(1, 20)]


def is_interrupt_blocked(_):
    return signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_workers_never_hear_of_ctrl_c_and_this_process_does():
    # What a worker inherits holds from its first instruction on, before it can ignore the signal.
    assert list(ordered(is_interrupt_blocked, range(1), 1)) == [True]
    assert not is_interrupt_blocked(0)


def test_an_error_in_a_worker_is_raised_here():
    with pytest.raises(DatasetError, match="bad 0"):
        list(ordered(fail, range(3), 1))


@pytest.mark.own_process  # a pool that ran its work here would end the tests
def test_a_worker_that_died_is_an_error_with_advice():
    with pytest.raises(DatasetError, match=r"a worker process died.*fewer --workers"):
        list(ordered(die, range(6), 1))
