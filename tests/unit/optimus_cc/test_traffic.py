"""What is counted and timed at the calls, on a clock of the test's own."""

import pytest
import torch

from optimus_cc import COMPRESSION, Kind, Traffic, traffic as module

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


class Clock:
    now = 0.0

    def perf_counter(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(module, "time", made)
    return made


def seconds(traffic):
    return {part: s for part, s in traffic.seconds().items() if s}


def test_times_add_up_by_part_and_an_inner_one_is_not_counted_twice(clock):
    traffic = Traffic(CPU)
    with traffic.timed(Kind.FORWARD):
        clock.now += 1.0
    clock.now += 100.0
    with traffic.timed(COMPRESSION):
        clock.now += 2.0
        with traffic.timed(Kind.GRADIENTS):
            clock.now += 4.0
        clock.now += 8.0
    assert seconds(traffic) == {"forward": 1.0, "compression": 10.0, "gradients": 4.0}
    with traffic.timed(Kind.FORWARD):
        clock.now += 16.0
    assert seconds(traffic)["forward"] == 17.0
    traffic.reset()
    assert seconds(traffic) == {}


def test_a_call_that_fails_leaves_the_others_their_times(clock):
    traffic = Traffic(CPU)

    def fail():
        with traffic.timed(Kind.FORWARD):
            clock.now += 1.0
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    with traffic.timed(Kind.EMBEDDING):
        clock.now += 2.0
    assert seconds(traffic) == {"forward": 1.0, "embedding": 2.0}


def test_nothing_is_timed_without_a_device(clock):
    traffic = Traffic()
    with traffic.timed(Kind.FORWARD):
        clock.now += 1.0
    assert seconds(traffic) == {}


@pytest.mark.parametrize(("num_ranks", "expected"), [(1, 0), (2, 400), (4, 600)])
def test_an_all_reduce_is_counted_as_a_ring(num_ranks, expected):
    traffic = Traffic()
    traffic.all_reduce(Kind.GRADIENTS, torch.zeros(100), num_ranks)
    assert traffic.sent[Kind.GRADIENTS].sent_bytes == expected
    traffic.reset()
    assert traffic.sent[Kind.GRADIENTS].sent_bytes == 0


def test_on_a_device_the_process_waits_for_it_at_the_end_alone(monkeypatch):
    """Events stand in for the device's; what they were told is in the order of the calls."""
    told = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.number = sum(word == "record" for word in told)
            told.append("record")

        def synchronize(self):
            told.append("wait")

        def elapsed_time(self, later):
            assert "wait" in told
            return 1000.0 * (later.number - self.number)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    traffic = Traffic(CUDA)
    with traffic.timed(COMPRESSION), traffic.timed(Kind.GRADIENTS):
        pass
    assert told == ["record"] * 4
    assert seconds(traffic) == {"compression": 2.0, "gradients": 1.0}
