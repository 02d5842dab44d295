"""The CUDA device on a stand-in for the CUDA runtime: no wait is missing, and each is needed."""

import sys
import threading

import pytest
import torch
from cuda_memory import DeviceTensor, stand_in
from engine_iterations import run_iterations
from engine_updates import (
    ADAM,
    SCHEDULES,
    TAIL,
    first_scalars,
    make_executor,
    make_schedule,
    make_subgroups,
    make_work,
    run_once,
)

from deep_optimizer_states.device import cuda
from deep_optimizer_states.device.base import Wait
from deep_optimizer_states.device.cuda import CudaDevice
from deep_optimizer_states.device.emulated import EmulatedDevice
from deep_optimizer_states.errors import KernelError, UpdateError

SLOW_S = 0.005
RACES = 200 // len(SCHEDULES)
"""Seeds for each schedule."""


@pytest.fixture(scope="module")
def expected():
    device = EmulatedDevice(ADAM)
    result = run_iterations(device, make_schedule())
    device.close()
    assert not result.isnan().any()
    return result


def race(schedule, seed=0, jitter_s=0.0, slow=None):
    """Iterations on the stand-in, one of whose streams may be slow."""
    with stand_in(seed, jitter_s) as runtime:
        device = CudaDevice(TAIL.mode)
        if slow is not None:
            stream = runtime.current_stream() if slow == "caller" else getattr(device, slow)._stream
            stream.jitter_s = SLOW_S
        result = run_iterations(device, schedule)
        device.close()
        assert runtime.page_locks.ranges == {}
        return result, runtime.page_locks.faults


def is_ever_wrong(expected, schedule, slow):
    """On a busy machine a race is now and then won: several seeds, until the first that is lost."""
    races = (race(schedule, seed, slow=slow) for seed in range(10))
    return any(faults or not torch.equal(result, expected) for result, faults in races)


@pytest.mark.parametrize("slow", [None, "caller", "h2d", "compute", "d2h", "weights", "grads"])
@pytest.mark.parametrize("name", ["stride 1", "stride and ratio", "dynamic, tiles"])
def test_a_slow_stream_changes_nothing(expected, name, slow):
    result, faults = race(SCHEDULES[name], slow=slow)
    assert torch.equal(result, expected)
    assert faults == []


@pytest.mark.parametrize("name", SCHEDULES)
def test_any_schedule_gives_the_all_host_result(expected, name):
    result, faults = race(SCHEDULES[name], jitter_s=0.0004)
    assert torch.equal(result, expected)
    assert faults == []


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", SCHEDULES)
def test_random_delays_change_nothing(expected, name):
    for seed in range(RACES):
        result, faults = race(SCHEDULES[name], seed, jitter_s=0.0004)
        assert torch.equal(result, expected), f"seed {seed}"
        assert faults == []


CONTROLS = {
    Wait.SLOT_FREE: ("stride 1", "d2h"),
    Wait.PREFETCHED: ("stride 1", "h2d"),
    Wait.STEPPED: ("stride 1", "compute"),
    Wait.STAGING_FREE: ("all-host, tiles", "weights"),
    Wait.GRADS_FLUSHED: ("stride 1", "grads"),
    Wait.GRAD_READY: ("stride 1", "caller"),
    Wait.GRAD_HOME: ("stride 1", "grads"),
    Wait.WEIGHTS_IDLE: ("all-device", "caller"),
    Wait.WEIGHTS_READY: ("stride 1", "compute"),
}
"""Where each wait shows: the schedule, and the stream that must be slow. Not GRAD_READ: here every
weight is gathered before a gradient is overwritten; the gate's own tests leave it out."""


@pytest.mark.parametrize("wait", CONTROLS)
def test_without_a_wait_the_result_differs(expected, monkeypatch, wait):
    """Negative control of every ordering rule, as CUDA keeps it."""

    def leave_out(owner, name):
        keep = getattr(owner, name)
        skip = lambda self, event, why: None if why is wait else keep(self, event, why)  # noqa: E731
        monkeypatch.setattr(owner, name, skip)

    leave_out(cuda._StreamLane, "wait")
    leave_out(CudaDevice, "caller_waits")
    leave_out(CudaDevice, "host_waits")
    monkeypatch.setattr(CudaDevice, "leaves_out", lambda self, why: why is wait)
    name, slow = CONTROLS[wait]
    assert is_ever_wrong(expected, SCHEDULES[name], slow)


def test_without_record_stream_memory_is_reused_too_early(expected, monkeypatch):
    """Negative control of ``uses``."""
    monkeypatch.setattr(DeviceTensor, "record_stream", lambda self, stream: None)
    assert is_ever_wrong(expected, SCHEDULES["stride 1"], "grads")


def test_events_recorded_on_another_stream_order_nothing(expected, monkeypatch):
    """Negative control of where a lane records."""
    record = lambda self: cuda._StreamEvent(torch.cuda.current_stream(), self.name)  # noqa: E731
    monkeypatch.setattr(cuda._StreamLane, "record", record)
    assert is_ever_wrong(expected, SCHEDULES["stride 1"], "d2h")


def test_the_callers_event_is_one_of_its_current_stream(expected, monkeypatch):
    """Negative control of where the caller's work is looked for."""
    monkeypatch.setattr(CudaDevice, "record_caller", lambda self: self.weights.record())
    assert is_ever_wrong(expected, SCHEDULES["stride 1"], "caller")


@pytest.mark.parametrize("policy", ["all-host", "all-device"])
def test_a_tile_is_announced_with_the_event_after_which_its_weights_are_written(policy):
    schedule, unwritten = make_schedule(policy, tile_numel=256), []
    with stand_in(jitter_s=0.004):
        device, subgroups = CudaDevice(TAIL.mode), make_subgroups()
        work = on_device_where_needed(device, schedule, subgroups)
        host_weights = device.empty_host(1024, torch.bfloat16)

        def on_issued(tile, event):
            event.synchronize()
            weights = work[tile].tensors.weights
            with torch.cuda.stream(torch.cuda.Stream()):  # ordered after nothing
                seen = host_weights.narrow(0, 0, weights.numel()).copy_(weights)
            if seen.isnan().any():
                unwritten.append(tile)

        run_once(make_executor(schedule, device), schedule, work, on_issued)
        device.close()
    assert unwritten == []


def on_device_where_needed(device, schedule, subgroups):
    for subgroup in subgroups:
        subgroup.grad.zero_()
    placed = [
        type(tensors)(
            *(device.host_home(tensor) for tensor in (*tensors.state, tensors.grad)),
            device.empty_device(tensors.numel, tensors.weights.dtype),
        )
        for tensors in subgroups
    ]
    return make_work(schedule, placed, first_scalars())


def run_with(device, executor=None):
    schedule = make_schedule("all-device", tile_numel=256)
    executor = executor or make_executor(schedule, device)
    run_once(executor, schedule, on_device_where_needed(device, schedule, make_subgroups()))


def test_a_kernel_that_cannot_be_launched_names_lane_and_tile(monkeypatch):
    def adam(self, tensors, scalars, tail_start):
        raise RuntimeError("Triton Error [CUDA]: out of resources")

    monkeypatch.setattr(CudaDevice, "adam", adam)
    with stand_in() as runtime:
        device = CudaDevice(TAIL.mode)
        with pytest.raises(UpdateError, match=r"lane GPU, step of tile 0: Triton.*out of resources"):
            run_with(device)
        device.close()
        assert runtime.page_locks.ranges == {}


def break_device():
    raise RuntimeError("an illegal memory access was encountered")


CALLS = {
    "submit": lambda d: d.h2d.submit("prefetch of tile 3", lambda: None),
    "record": lambda d: d.h2d.record(),
    "stamp": lambda d: d.h2d.stamp(),
    "wait": lambda d: d.h2d.wait(d.early, Wait.SLOT_FREE),
    "record_caller": lambda d: d.record_caller(),
    "caller_waits": lambda d: d.caller_waits(d.early, Wait.GRAD_HOME),
    "host_waits": lambda d: d.host_waits(d.early, Wait.GRADS_FLUSHED),
    "reached": lambda d: d.early.reached(),
    "seconds_since": lambda d: d.stamps[1].seconds_since(d.stamps[0]),
    "synchronize": lambda d: d.synchronize(),
    "close": lambda d: d.close(),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_kernel_that_fails_as_it_runs_surfaces_at_any_later_call(call):
    with stand_in() as runtime:
        device = CudaDevice(TAIL.mode)
        device.early = device.h2d.record()
        device.stamps = device.h2d.stamp(), device.h2d.stamp()
        device.h2d.submit("a kernel", lambda: runtime.launch(break_device))
        while runtime.failure is None:
            threading.Event().wait(0.001)
        where = r"(lane (H2D|compute|weights)|caller's stream).*: CUDA error: an illegal memory"
        with pytest.raises(UpdateError, match=where):
            CALLS[call](device)


@pytest.mark.parametrize("failing", [0, 3])
def test_a_step_that_breaks_the_device_fails_the_update_and_close_still_unlocks(
    monkeypatch, failing
):
    steps, queue_adam = [], CudaDevice.adam

    def adam(self, *args):
        steps.append(args)
        if len(steps) == failing + 1:
            runtime.launch(break_device)
        queue_adam(self, *args)

    monkeypatch.setattr(CudaDevice, "adam", adam)
    with stand_in() as runtime:
        device = CudaDevice(TAIL.mode)
        with pytest.raises(UpdateError, match=r"lane \w+.*tile \d+.*an illegal memory access"):
            run_with(device)
        with pytest.raises(UpdateError, match="an illegal memory access"):
            device.close()
        assert runtime.page_locks.ranges == {}
        assert runtime.page_locks.faults == []
