"""What the CUDA device says about times: spans of a timeline, stamps for the dynamic split."""

import threading
import time
from collections import defaultdict
from itertools import pairwise

import pytest
import torch
from cuda_memory import stand_in
from engine_iterations import run_iterations
from engine_updates import SCHEDULES, TAIL
from late import late

from deep_optimizer_states.core.device.base import Wait
from deep_optimizer_states.core.device.cuda import CudaDevice
from deep_optimizer_states.core.timeline import Recorder

CLOCKS_APART_S = 1234.5
"""The GPU's clock began at another time than the host's."""
SLACK_S = 200.0
"""Until the host notices, on a busy machine, that the moment to read both clocks has come."""
LONG_S = 100_000.0
"""What a slow kernel takes on the clocks of these tests, in which nobody waits for it."""


FP32_S = 0.01
"""CUDA gives fp32 milliseconds, which are this coarse after ``LONG_S``."""


@pytest.fixture
def take_long(monkeypatch):
    """A kernel during which both clocks go on by ``LONG_S``."""
    perf_counter, passed_s = time.perf_counter, [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: perf_counter() + passed_s[0])

    def kernel():
        passed_s[0] += LONG_S

    return kernel


@pytest.fixture
def runtime():
    with stand_in(jitter_s=0.0004) as runtime:
        runtime.age_s = CLOCKS_APART_S
        yield runtime


def test_spans_lie_in_their_update_and_do_not_overlap_on_a_lane(runtime, monkeypatch):
    recorder, updates, calls, set_clock = Recorder(), [], [], CudaDevice.set_clock
    monkeypatch.setattr(CudaDevice, "set_clock", lambda self: calls.append(set_clock(self)))
    device = CudaDevice(TAIL.mode, recorder)
    timeline = recorder, lambda spans, begin, end: updates.append((spans, begin, end))
    result = run_iterations(device, SCHEDULES["stride 2, tiles"], timeline=timeline)
    device.close()
    assert not result.isnan().any()
    assert len(updates) == len(calls) == 2, "every update sets the clock anew"
    assert any(span.lane == "grads" for spans, _, _ in updates for span in spans)
    for spans, begin, end in updates:
        lanes = defaultdict(list)
        for span in spans:
            assert span.begin_s <= span.end_s, span
            assert span.end_s <= end + SLACK_S
            lanes[span.lane].append(span)
        lanes.pop("grads", None)  # whose flushes are backward's, of this step or of the next
        assert set(lanes) == {"CPU", "H2D", "GPU", "D2H", "weights"}
        for found in lanes.values():
            assert found[0].begin_s >= begin - SLACK_S
            for one, other in pairwise(found):
                assert one.end_s <= other.begin_s + 1e-4, "fp32 milliseconds"
    names = [span.what for span in updates[0][0] if span.lane in ("H2D", "GPU", "D2H")]
    assert {name.split(" tile")[0] for name in names} == {
        "prefetch of",
        "step of",
        "state flush of",
    }


def test_a_span_lasts_as_long_as_the_work_on_its_stream(runtime, take_long):
    recorder, submitted = Recorder(), threading.Event()
    device = CudaDevice(TAIL.mode, recorder)
    before = time.perf_counter()
    # Who submits does not wait, or they wait for each other.
    device.compute.submit(
        "a step", lambda: runtime.launch(lambda: submitted.wait() and take_long())
    )
    submitted.set()
    device.synchronize()
    after = time.perf_counter()
    device.close()
    (span,) = recorder.take()
    assert (span.lane, span.what) == ("GPU", "a step")
    assert LONG_S <= span.end_s - span.begin_s + FP32_S <= after - before + 2 * FP32_S
    assert before - SLACK_S <= span.begin_s <= after - LONG_S + SLACK_S


def test_a_span_that_is_not_over_is_waited_for():
    """A flush of the next backward may have come in while an update ended."""
    recorder, flushed = Recorder(), []
    with late() as world, stand_in(world=world) as runtime:
        device = CudaDevice(TAIL.mode, recorder)
        world.late.add(device.grads._stream)
        device.grads.submit("a flush", lambda: runtime.launch(lambda: flushed.append(True)))
        assert not flushed
        (span,) = recorder.take()
        assert flushed
        assert span.end_s >= span.begin_s
        device.close()


@pytest.mark.parametrize("is_set_anew", [True, False])
def test_a_clock_that_is_set_anew_keeps_its_digits(runtime, monkeypatch, is_set_anew):
    """CUDA gives fp32 milliseconds: after hours they are coarse. With its negative control."""
    recorder, coarse_ms = Recorder(), 16
    device = CudaDevice(TAIL.mode, recorder)
    runtime.age_s += 40 * 3600
    if is_set_anew:
        device.set_clock()
    for number in range(5):
        device.h2d.submit(f"copy {number}", lambda: runtime.launch(lambda: time.sleep(0.005)))
    device.synchronize()
    device.close()
    steps = [1e3 * (span.end_s - span.begin_s) / coarse_ms for span in recorder.take()]
    assert len(steps) == 5
    assert all(abs(step - round(step)) < 1e-4 for step in steps) == (not is_set_anew)


def test_the_clocks_are_read_at_the_same_moment(runtime, take_long):
    recorder = Recorder()
    device = CudaDevice(TAIL.mode, recorder)
    with torch.cuda.stream(device._clock._own_stream):
        # The GPU comes late to the event that is timed.
        runtime.launch(lambda: time.sleep(0.1) or take_long())
    device.set_clock()
    before = time.perf_counter()
    device.h2d.submit("a copy", lambda: torch.ones(1, device="cuda"))
    device.synchronize()
    (span,) = recorder.take()
    assert before - SLACK_S <= span.begin_s <= span.end_s <= time.perf_counter() + SLACK_S
    device.close()


def test_the_clock_waits_for_nobodys_work_and_is_none_without_a_timeline(runtime):
    """Or it waits for ever."""
    devices, release = [CudaDevice(TAIL.mode, Recorder()), CudaDevice(TAIL.mode)], threading.Event()
    runtime.launch(release.wait)
    for device in devices:
        device.set_clock()
    release.set()
    for device in devices:
        device.close()


def test_stamps_measure_a_lane(runtime, take_long):
    device = CudaDevice(TAIL.mode)
    before = time.perf_counter()
    begin = device.h2d.stamp()
    device.h2d.submit("a copy", lambda: runtime.launch(take_long))
    device.d2h.wait(device.h2d.record(), Wait.STEPPED)
    end = device.d2h.stamp()
    device.synchronize()
    passed_s = time.perf_counter() - before
    assert LONG_S <= end.seconds_since(begin) + FP32_S <= passed_s + 2 * FP32_S
    assert begin.seconds_since(end) == -end.seconds_since(begin)
    device.close()
