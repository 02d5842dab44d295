"""What the CUDA device says and leaves behind when the GPU fails, hangs or cannot step."""

import sys
import time
from types import SimpleNamespace

import pytest
import torch
from cuda_memory import stand_in
from cuda_runtime import Point
from engine_iterations import place
from engine_updates import TAIL, Setup, make_schedule, make_subgroups

from deep_optimizer_states.core.device import cuda
from deep_optimizer_states.core.device.base import Wait
from deep_optimizer_states.core.device.cuda import CudaDevice
from deep_optimizer_states.core.kernels.host import HostAdam
from deep_optimizer_states.core.verify import check_device_adam
from deep_optimizer_states.errors import KernelError, UpdateError


def run_with(device, policy="all-device"):
    schedule = make_schedule(policy, tile_numel=256)
    Setup(schedule, device, place(device, schedule, make_subgroups())).update()


def break_device():
    raise RuntimeError("an illegal memory access was encountered")


def test_a_kernel_that_cannot_be_launched_names_lane_and_tile(cuda_device, monkeypatch):
    def adam(self, tensors, scalars, tail_start):
        raise RuntimeError("out of resources: shared memory")

    monkeypatch.setattr(CudaDevice, "adam", adam)
    with pytest.raises(UpdateError, match=r"^lane GPU, step of tile 0: out of resources"):
        run_with(cuda_device)


def launch_on(device):
    device.h2d.submit("prefetch of tile 4", lambda: torch.ones(1, device="cuda"))


CALLS = {
    "submit": launch_on,
    "record": lambda device: device.h2d.record(),
    "stamp": lambda device: device.h2d.stamp(),
    "wait": lambda device: device.h2d.wait(device.early, Wait.SLOT_FREE),
    "record_caller": lambda device: device.record_caller(),
    "caller_waits": lambda device: device.caller_waits(device.early, Wait.GRAD_HOME),
    "host_waits": lambda device: device.host_waits(device.early, Wait.GRADS_FLUSHED),
    "reached": lambda device: device.early.reached(),
    "seconds_since": lambda device: device.stamps[1].seconds_since(device.stamps[0]),
    "synchronize": lambda device: device.synchronize(),
    "close": lambda device: device.close(),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_kernel_that_fails_as_it_runs_is_named_by_any_later_call(call):
    with stand_in() as runtime:
        device = CudaDevice(TAIL.mode)
        device.early = device.h2d.record()
        device.stamps = device.h2d.stamp(), device.h2d.stamp()
        device.h2d.submit("prefetch of tile 3", lambda: runtime.launch(break_device))
        where = r"lane H2D[ ,(]+(prefetch of tile [34]|nothing yet)\)?"
        if call in ("record_caller", "caller_waits"):
            where = "the caller's stream"
        with pytest.raises(UpdateError, match=f"^{where}: CUDA error: an illegal memory"):
            CALLS[call](device)


@pytest.mark.parametrize("failing", [0, 3])
def test_a_step_that_breaks_the_gpu_fails_the_update_and_close_still_unlocks(monkeypatch, failing):
    steps, queue_adam = [], CudaDevice.adam

    def adam(self, *args):
        steps.append(args)
        if len(steps) == failing + 1:
            runtime.launch(break_device)
        queue_adam(self, *args)

    monkeypatch.setattr(CudaDevice, "adam", adam)
    with stand_in() as runtime:
        device = CudaDevice(TAIL.mode)
        with pytest.raises(UpdateError, match=r"^lane \w+.*tile \d+.*: an illegal memory access"):
            run_with(device)
        assert runtime.page_locks.ranges
        with pytest.raises(UpdateError, match="an illegal memory access"):
            device.close()
        assert runtime.page_locks.ranges == {}
        assert runtime.page_locks.faults == []


@pytest.fixture
def hung(monkeypatch):
    """A device whose state flush does not end, and memory that the flush writes to."""
    monkeypatch.setattr(cuda, "_given_up", [])
    ends = Point()
    with stand_in() as runtime:
        device = CudaDevice(TAIL.mode)
        source, home = torch.ones(64, device="cuda"), device.empty_host(64, torch.float32)

        def flush():
            runtime.current_stream().wait_for(ends)
            home.copy_(source, non_blocking=True)

        device.d2h.submit("state flush of tile 3", flush)
        yield device, runtime
        ends.arrive(0.0)
        device.close()


def test_what_is_never_reached_is_waited_for_a_bounded_time(hung):
    device, _ = hung
    where = r"^waited 600 s for lane D2H \(state flush of tile 3\)$"
    for wait in (
        device.synchronize,
        device.d2h.record().synchronize,
        lambda: device.host_waits(device.d2h.record(), Wait.STAGING_FREE),
    ):
        with pytest.raises(UpdateError, match=where):
            wait()
    device.caller_waits(device.d2h.record(), Wait.GRAD_HOME)
    with pytest.raises(UpdateError, match=r"^waited 600 s for the caller's stream$"):
        device.record_caller().synchronize()


def interrupt(seconds):
    raise KeyboardInterrupt


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_a_gpu_that_hangs_does_not_hang_close_and_keeps_its_memory(
    hung, monkeypatch, is_interrupted
):
    device, runtime = hung
    ranges = dict(runtime.page_locks.ranges)
    told = pytest.raises(UpdateError, match=r"waited 600 s for lane D2H")
    with monkeypatch.context() as patch:
        if is_interrupted:
            patch.setattr(cuda, "time", SimpleNamespace(monotonic=time.monotonic, sleep=interrupt))
            told = pytest.raises(KeyboardInterrupt)
        with told:
            device.close()
    assert len(runtime.page_locks.ranges) == 1
    assert runtime.page_locks.ranges == ranges
    assert runtime.page_locks.faults == []
    assert len(cuda._given_up) == 1


def test_a_caller_that_hangs_does_not_hang_close(monkeypatch):
    monkeypatch.setattr(cuda, "_given_up", [])
    with stand_in() as runtime:
        device = CudaDevice(TAIL.mode)
        runtime.current_stream().wait_for(Point())
        with pytest.raises(UpdateError, match=r"waited 600 s for the caller's stream"):
            device.close()


def test_without_triton_the_device_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(
        sys.modules, "deep_optimizer_states.core.kernels.triton_adam", raising=False
    )
    with stand_in(triton=False):
        device = CudaDevice(TAIL.mode)
        with pytest.raises(KernelError, match=r'cannot step: .*triton.*; use policy "all-host"'):
            check_device_adam(
                device, HostAdam(TAIL.mode), TAIL, True, (torch.bfloat16, torch.bfloat16)
            )
        run_with(device, "all-host")
        with pytest.raises(ImportError):
            run_with(device)
        device.close()
