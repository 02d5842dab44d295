"""What the CUDA device says about times: stamps, for the dynamic split and for calibration."""

import time

import pytest
from cuda_memory import stand_in
from engine_iterations import run_iterations
from engine_updates import SCHEDULES, TAIL

from deep_optimizer_states.core.device.base import Wait
from deep_optimizer_states.core.device.cuda import CudaDevice
from deep_optimizer_states.core.policies import RunTimeSplit

CLOCKS_APART_S = 1234.5
"""The GPU's clock began at another time than the host's."""
LONG_S = 100_000.0
"""What a slow kernel takes on the clocks of these tests, in which nobody waits for it."""
FP32_S = 0.01
"""CUDA gives fp32 milliseconds, which are this coarse after ``LONG_S``."""


@pytest.fixture
def device():
    with stand_in() as runtime:
        runtime.age_s = CLOCKS_APART_S
        device = CudaDevice(TAIL.mode)
        device.runtime = runtime
        yield device
        device.close()


def test_stamps_measure_a_lane(device, monkeypatch):
    perf_counter, passed_s = time.perf_counter, [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: perf_counter() + sum(passed_s))
    before = time.perf_counter()
    begin = device.h2d.stamp()
    device.h2d.submit("a copy", lambda: device.runtime.launch(lambda: passed_s.append(LONG_S)))
    device.d2h.wait(device.h2d.record(), Wait.STEPPED)
    end = device.d2h.stamp()
    device.synchronize()
    took_s = time.perf_counter() - before
    assert LONG_S <= end.seconds_since(begin) + FP32_S <= took_s + 2 * FP32_S
    assert begin.seconds_since(end) == -end.seconds_since(begin)


def test_the_dynamic_split_learns_of_flights_on_streams(device, monkeypatch):
    seen, learn = [], RunTimeSplit.learn

    def watch(self, steps, flights, seconds):
        seen.append(len(flights))
        ends = [flight.end_s for flight in flights]
        assert ends == sorted(ends)
        assert all(0 <= flight.begin_s < flight.end_s <= seconds for flight in flights)
        learn(self, steps, flights, seconds)

    monkeypatch.setattr(RunTimeSplit, "learn", watch)
    run_iterations(device, SCHEDULES["dynamic, tiles"], steps=3)
    assert len(seen) == 3
    assert seen[0] >= 3
