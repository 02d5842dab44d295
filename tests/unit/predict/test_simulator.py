"""What the predictions of whole updates and iterations do not show of the clock."""

import pytest

from deep_optimizer_states.predict.simulator import Job, Simulator


def lanes(**capacity):
    return Simulator(lambda resource, in_use: capacity[resource])


def test_work_of_nothing_takes_no_time():
    clock = lanes(link=1.0)
    job = clock.submit(Job("a", "nothing", 0, 10, {"link": 1.0}))
    clock.run_until()
    assert job.end_s == 0.0


def test_lanes_that_wait_for_each_other_are_an_error():
    clock = lanes()
    never = Job("c", "never", 1, 1)
    clock.submit(Job("a", "stuck", 1, 1, after=(never,)))
    with pytest.raises(AssertionError, match="wait for each other"):
        clock.run_until()
