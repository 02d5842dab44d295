"""The CUDA device on a stand-in for the CUDA runtime: no wait is missing, and each is needed."""

import time

import pytest
import torch
from cuda_memory import DeviceTensor, stand_in
from engine_iterations import place, run_iterations
from engine_updates import ADAM, SCHEDULES, TAIL, Setup, make_schedule, make_subgroups
from turns import some

from deep_optimizer_states.core.cache import TileCache, copy_all
from deep_optimizer_states.core.device import cuda
from deep_optimizer_states.core.device.base import Wait
from deep_optimizer_states.core.device.cuda import CudaDevice
from deep_optimizer_states.core.device.emulated import EmulatedDevice
from deep_optimizer_states.core.policies import RunTimeSplit
from deep_optimizer_states.core.verify import Sample
from deep_optimizer_states.errors import UpdateError


@pytest.fixture(scope="module")
def expected():
    device = EmulatedDevice(ADAM)
    result = run_iterations(device, make_schedule())
    device.close()
    assert not result.isnan().any()
    return result


def make_late(runtime, device, stream):
    """Let one stream be as late as the waits allow; None for none."""
    if stream is not None:
        caller = runtime.current_stream()
        runtime.world.late.add(caller if stream == "caller" else getattr(device, stream)._stream)


def is_wrong(expected, schedule, stream, **options):
    with stand_in() as runtime:
        device = CudaDevice(TAIL.mode)
        make_late(runtime, device, stream)
        result = run_iterations(device, schedule, **options)
        device.close()
        assert runtime.page_locks.ranges == {}
        return bool(runtime.page_locks.faults) or not torch.equal(result, expected)


STREAMS = [None, "caller", "h2d", "compute", "d2h", "weights", "grads"]
KEPT, AHEAD = {"stays": 4}, {"ahead": 6}
MOVED = {"stays": 4, "ahead": 6, "move": TileCache.release}
KEEPING = ("stride 3", "all-device", "stride 2, tiles")
SENDING = ("all-host, tiles", "stride 1", "stride 1, weights on the host")
ON_HOST = "weights on the host"
CONTROLS = [
    (Wait.SLOT_FREE, "stride 1", "d2h", {}),
    (Wait.PREFETCHED, "stride 1", "h2d", {}),
    (Wait.STEPPED, "stride 1", "compute", {}),
    (Wait.STAGING_FREE, "all-host, tiles", "weights", {}),
    (Wait.GRADS_FLUSHED, "stride 1", "grads", {}),
    (Wait.GRAD_READY, "stride 1", "caller", {}),
    (Wait.GRAD_HOME, "stride 1", "grads", {}),
    (Wait.WEIGHTS_IDLE, "all-device", "caller", {}),
    (Wait.WEIGHTS_READY, "stride 1", "compute", {}),
    # Weights that are page-locked, written by the CPU and sent back.
    (Wait.SLOT_FREE, f"stride 1, {ON_HOST}", "d2h", {}),
    (Wait.STEPPED, f"ratio, tiles, {ON_HOST}", "compute", {}),
    (Wait.STAGING_FREE, f"ratio, tiles, {ON_HOST}", "d2h", {}),
    (Wait.WEIGHTS_IDLE, f"all-host, tiles, {ON_HOST}", "caller", {}),
    (Wait.WEIGHTS_READY, f"stride 1, {ON_HOST}", "d2h", {}),
    # State and gradients that stay on the device.
    (Wait.GRADS_FLUSHED, "all-device", "grads", KEPT),
    (Wait.PREFETCHED, "all-device", "h2d", KEPT),
    (Wait.HOME_WHOLE, "all-host, tiles", "d2h", MOVED),
    # Memory of state sent ahead, which the allocator hands out and takes back.
    (Wait.PREFETCHED, "all-host, tiles", "h2d", AHEAD),
    (Wait.STEPPED, "all-host, tiles", "compute", AHEAD),
]
"""Where each wait shows, as in ``LATE``.

Not GRAD_READ, which waits on the host for a tile's event: here every weight is gathered, and so
every tile stepped, before a gradient is overwritten; it is left out under DeepSpeed. Nor
MEMORY_IDLE: the stand-in gives no memory out twice; ``test_caller.py`` has it.
"""


LATE = [
    *((name, stream, {}) for name in SCHEDULES for stream in STREAMS),
    *((name, stream, KEPT) for name in KEEPING for stream in STREAMS),
    *((name, stream, MOVED) for name in SENDING for stream in STREAMS),
]
"""A schedule, the late stream, and options of the iterations."""


@pytest.mark.parametrize(
    ("name", "stream", "options"),
    some(LATE, one_in=6, always=[tuple(row[1:]) for row in CONTROLS]),
)
def test_a_late_stream_changes_nothing(expected, name, stream, options):
    """Where a wait shows that is left out, and elsewhere."""
    assert not is_wrong(expected, SCHEDULES[name], stream, **options)


def leave_out(monkeypatch, wait):
    """Keep an ordering rule no longer."""

    def skip(owner, name):
        keep = getattr(owner, name)
        monkeypatch.setattr(
            owner, name, lambda self, event, why: None if why is wait else keep(self, event, why)
        )

    skip(cuda._StreamLane, "wait")
    skip(CudaDevice, "caller_waits")
    skip(CudaDevice, "host_waits")
    monkeypatch.setattr(CudaDevice, "leaves_out", lambda self, why: why is wait)


@pytest.mark.parametrize(("wait", "name", "stream", "options"), CONTROLS)
def test_without_a_wait_the_result_differs(expected, monkeypatch, wait, name, stream, options):
    """Negative control of every ordering rule, as CUDA keeps it."""
    leave_out(monkeypatch, wait)
    assert is_wrong(expected, SCHEDULES[name], stream, **options)


def submit_without_uses(self, what, work, uses=(), submit=cuda._StreamLane.submit):
    submit(self, what, work, () if self.name == "D2H" else uses)


def record_current(self):
    return cuda._StreamEvent(torch.cuda.current_stream(), self.name)


BROKEN = {
    # Of the state flush, after which nobody looks at the memory.
    (cuda._StreamLane, "submit", submit_without_uses): ("all-host, tiles", "d2h", AHEAD),
    (DeviceTensor, "record_stream", lambda self, stream: None): ("stride 1", "grads", {}),
    (cuda._StreamLane, "record", record_current): ("stride 1", "d2h", {}),
    (CudaDevice, "record_caller", lambda self: self.weights.record()): ("stride 1", "caller", {}),
}


@pytest.mark.parametrize(("wrong", "where"), BROKEN.items(), ids=lambda given: given[1])
def test_memory_in_use_and_places_of_events_are_kept(expected, monkeypatch, wrong, where):
    """Negative controls: memory is reused too early, or an event orders nothing."""
    name, stream, options = where
    monkeypatch.setattr(*wrong)
    assert is_wrong(expected, SCHEDULES[name], stream, **options)


def test_a_rank_on_the_second_gpu_works_there_alone(runtime, expected):
    runtime.current_stream(0).put = None  # nothing may come there
    torch.cuda.set_device(1)
    device = CudaDevice(TAIL.mode)
    result = run_iterations(device, SCHEDULES["stride 1"])
    device.close()
    del runtime.current_stream(0).put
    assert torch.equal(result, expected)


def test_lanes_run_side_by_side_and_hold_nobody_up(runtime, cuda_device):
    device, copied = cuda_device, {}
    make_late(runtime, device, "compute")
    homes = [device.host_home(torch.ones(8)) for _ in device.lanes]
    targets = [torch.zeros(8, device="cuda") for _ in device.lanes]
    for lane, home, target in zip(device.lanes, homes, targets, strict=True):
        lane.submit("a copy", lambda t=target, h=home: copy_all((t,), (h,)))
        lane.submit("a copy back", lambda t=target, h=home: copy_all((h,), (t,)))
        copied[lane.name] = lane.record()
    torch.cuda.current_stream().synchronize()
    assert [name for name, event in copied.items() if not event.reached()] == ["GPU"]
    device.close()


@pytest.mark.parametrize(("wait", "name", "stream"), [row[:3] for row in CONTROLS[:4]])
def test_a_race_is_found_by_repeating_a_sample_and_no_other_alarm_is_raised(
    monkeypatch, wait, name, stream
):
    def update_and_repeat_a_sample():
        with stand_in() as runtime:
            device = CudaDevice(TAIL.mode)
            make_late(runtime, device, stream)
            placed = place(device, SCHEDULES[name], make_subgroups())
            for tensors in placed:
                tensors.grad.fill_(0.25)
            setup = Setup(SCHEDULES[name], device, placed)
            sample = Sample(setup.work)
            try:
                setup.update()
                sample.compare(ADAM, 1)
            finally:
                device.close()

    update_and_repeat_a_sample()
    leave_out(monkeypatch, wait)
    with pytest.raises(UpdateError, match=r"update 1 since the start, tile .* went wrong"):
        update_and_repeat_a_sample()


# Times: stamps, for the dynamic split and for calibration.

CLOCKS_APART_S = 1234.5
"""The GPU's clock began at another time than the host's."""
LONG_S = 100_000.0
"""What a slow kernel takes on the clocks of these tests, in which nobody waits for it."""
FP32_S = 0.01
"""CUDA gives fp32 milliseconds, which are this coarse after ``LONG_S``."""


def test_stamps_measure_a_lane(runtime, cuda_device, monkeypatch):
    runtime.age_s, device = CLOCKS_APART_S, cuda_device
    perf_counter, passed_s = time.perf_counter, [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: perf_counter() + sum(passed_s))
    before = time.perf_counter()
    begin = device.h2d.stamp()
    device.h2d.submit("a copy", lambda: runtime.launch(lambda: passed_s.append(LONG_S)))
    device.d2h.wait(device.h2d.record(), Wait.STEPPED)
    end = device.d2h.stamp()
    device.synchronize()
    took_s = time.perf_counter() - before
    assert LONG_S <= end.seconds_since(begin) + FP32_S <= took_s + 2 * FP32_S
    assert begin.seconds_since(end) == -end.seconds_since(begin)


def test_the_dynamic_split_learns_of_flights_on_streams(runtime, cuda_device, monkeypatch):
    runtime.age_s, seen, learn = CLOCKS_APART_S, [], RunTimeSplit.learn

    def watch(self, steps, flights, seconds):
        seen.append(len(flights))
        ends = [flight.end_s for flight in flights]
        assert ends == sorted(ends)
        assert all(0 <= flight.begin_s < flight.end_s <= seconds for flight in flights)
        learn(self, steps, flights, seconds)

    monkeypatch.setattr(RunTimeSplit, "learn", watch)
    run_iterations(cuda_device, SCHEDULES["dynamic, tiles"], steps=3)
    assert len(seen) == 3
    assert seen[0] >= 3
