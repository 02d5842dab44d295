"""Rules against the caller's own asynchronous work: a device whose caller is a lane as well."""

import dataclasses
import threading
import time

import pytest
import torch
from engine_iterations import Flusher
from processes import DEADLINE_S, wait_for

from deep_optimizer_states.device.base import Wait
from deep_optimizer_states.device.emulated import EmulatedDevice, Faults, _ThreadLane
from deep_optimizer_states.executor import Executor, Sizes, Work
from deep_optimizer_states.kernels.host import HostAdam
from deep_optimizer_states.kernels.scalars import BetaPowers, adam_scalars
from deep_optimizer_states.kernels.tensors import AdamTensors
from deep_optimizer_states.schedule import AllAtOnce, Schedule

ADAM = HostAdam(1)


class AsynchronousCaller(EmulatedDevice):
    """As on CUDA, where backward only queues its kernels."""

    def __init__(self, faults=None):
        super().__init__(ADAM, faults)
        self.caller = _ThreadLane("caller", Faults())

    def record_caller(self):
        return self.caller.record()

    def close(self):
        self.caller.close()
        super().close()


def open_device(without):
    return AsynchronousCaller(Faults(without=frozenset(without)))


def weights_that_backward_reads(without, policy, on_host=False):
    """What a backward that is still running reads while the update is launched."""
    device, read = open_device(without), {}
    ratio = 0.0 if policy == "ratio" else 1.0
    schedule = Schedule.make([256], policy, 1, ratio, 64)
    schedule = dataclasses.replace(schedule, weights_on_host=on_host)
    sizes = Sizes.of(schedule, torch.float32, torch.float32)
    executor = Executor(sizes, device, ADAM, 2)
    tensors = AdamTensors(*(torch.ones(256) for _ in range(5)))

    def backward():
        # With every wait nothing comes; without one the update may take its time to.
        deadline = time.monotonic() + (DEADLINE_S if without else 0.1)
        while tensors.weights.eq(1.0).all() and time.monotonic() < deadline:
            time.sleep(0.01)
        read["weights"] = tensors.weights.clone()

    device.caller.submit("backward", backward)
    group = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}
    group["bias_correction"] = True
    scalars = adam_scalars(group, BetaPowers(group["betas"]).at(1, group["betas"]), 1.0, True)
    work = [
        Work(str(t), tensors.narrow(t.start, t.numel), scalars, t.numel) for t in schedule.tiles
    ]
    arrivals = AllAtOnce(range(len(work)))
    executor.follow(executor.caller_events())
    actions = schedule.actions(arrivals, executor.share, executor.has_room)
    executor.run(work, actions, lambda tile, event: None)
    device.caller.record().synchronize()
    device.close()
    assert not torch.equal(tensors.weights, torch.ones(256)), "nothing was updated"
    return read["weights"]


WHERE = pytest.mark.parametrize("on_host", [False, True], ids=["on the device", "on the host"])


@WHERE
@pytest.mark.parametrize("policy", ["all-host", "all-device", "ratio"])
def test_weights_are_written_only_after_backward_has_read_them(policy, on_host):
    assert torch.equal(weights_that_backward_reads((), policy, on_host), torch.ones(256))


@WHERE
@pytest.mark.parametrize("policy", ["all-host", "all-device", "ratio"])
def test_without_the_wait_backward_reads_new_weights(policy, on_host):
    """Negative control."""
    read = weights_that_backward_reads({Wait.WEIGHTS_IDLE}, policy, on_host)
    assert not torch.equal(read, torch.ones(256))


def test_slots_are_filled_only_after_the_caller_has_left_their_memory():
    """An allocator may hand out memory that kernels of the caller still use."""
    device, release, copied = open_device(()), threading.Event(), []
    device.caller.submit("backward", lambda: release.wait(30))
    executor = Executor(Sizes(64, 64, torch.float32, torch.float32), device, ADAM, 2)
    ordered, wait = [], device.h2d.wait
    device.h2d.wait = lambda event, why: ordered.append((wait(event, why), why))
    run = threading.Thread(target=executor.follow, args=(executor.caller_events(),))
    run.start()
    wait_for(lambda: (None, Wait.WEIGHTS_IDLE) in ordered)
    device.h2d.submit("prefetch", lambda: copied.append(release.is_set()))
    time.sleep(0.1)
    release.set()
    run.join()
    device.synchronize()
    device.close()
    assert copied == [True]


@pytest.mark.parametrize("without", [(), (Wait.GRAD_READY,)], ids=["kept", "left out"])
def test_a_gradient_is_flushed_only_after_backward_has_reduced_it(without):
    device, reduced = open_device(without), threading.Event()
    device.caller.submit("reduction", lambda: reduced.wait(30))
    home = torch.zeros(8)
    Flusher(device, [home]).flush(0, torch.ones(8))
    if without:
        wait_for(home.any)
    else:
        time.sleep(0.1)  # it would come at once
    arrived_early = bool(home.any())
    reduced.set()
    device.synchronize()
    device.close()
    assert torch.equal(home, torch.ones(8))
    assert arrived_early == bool(without)


@pytest.mark.parametrize("without", [(), (Wait.MEMORY_IDLE,)], ids=["waited for", "not waited for"])
def test_state_sent_ahead_comes_only_after_the_caller_has_left_its_memory(without):
    """The second is the negative control."""
    device, release = open_device(without), threading.Event()
    device.caller.submit("backward", lambda: release.wait(30))
    executor = Executor(Sizes(64, 64, torch.float32, torch.float32), device, ADAM, 2)
    executor.send_ahead(0, "tile 0", [torch.ones(64) for _ in range(3)])
    deadline = time.monotonic() + (DEADLINE_S if without else 0.2)
    while executor.num_under_way_ahead and time.monotonic() < deadline:
        time.sleep(0.01)
    came_early = not executor.num_under_way_ahead
    release.set()
    device.synchronize()
    device.close()
    assert came_early == bool(without)


def test_memory_that_is_dropped_is_not_handed_out_before_the_copy_into_it_is_over():
    """The lane is named to the allocator."""
    device, used = open_device(()), []
    executor = Executor(Sizes(64, 64, torch.float32, torch.float32), device, ADAM, 2)
    submit = device.h2d.submit
    device.h2d.submit = lambda what, work, uses=(): (used.extend(uses), submit(what, work))
    executor.send_ahead(0, "tile 0", [torch.ones(64) for _ in range(3)])
    device.synchronize()
    device.close()
    assert [tensor.data_ptr() for tensor in used] == [
        tensor.data_ptr() for tensor in executor._ahead[0].tensors
    ]
