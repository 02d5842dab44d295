"""The clock: order on a lane, waiting, sharing."""

import pytest

from deep_optimizer_states.predict.simulator import Job, Simulator


def lanes(**capacity):
    return Simulator(lambda resource, in_use: capacity[resource])


def test_a_lane_does_one_job_after_the_other_and_lanes_run_at_once():
    clock = lanes()
    first, second = Job("a", "1", 10, 10), Job("a", "2", 20, 10)
    other = Job("b", "1", 25, 10)
    for job in (first, second, other):
        clock.submit(job)
    clock.run_until()
    assert (first.end_s, second.begin_s, second.end_s, other.end_s) == (1.0, 1.0, 3.0, 2.5)
    assert clock.done == [first, other, second]


def test_time_stops_when_the_job_asked_for_is_over():
    clock = lanes()
    short, long = clock.submit(Job("a", "short", 1, 1)), clock.submit(Job("b", "long", 9, 1))
    clock.run_until(short)
    assert clock.now_s == 1.0
    assert not long.is_done


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
