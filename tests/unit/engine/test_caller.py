"""Rules against the caller's own asynchronous work: a device whose caller is a lane as well."""

import dataclasses

import pytest
import torch
from engine_iterations import Flusher
from late import late

from deep_optimizer_states.core.device import emulated
from deep_optimizer_states.core.device.base import Wait
from deep_optimizer_states.core.device.emulated import EmulatedDevice, Faults
from deep_optimizer_states.core.executor import Executor, Types, Work
from deep_optimizer_states.core.kernels.adam import AdamTensors, BetaPowers, adam_scalars
from deep_optimizer_states.core.kernels.host import HostAdam
from deep_optimizer_states.core.schedule import AllAtOnce, Schedule

ADAM = HostAdam(1)


class AsynchronousCaller(EmulatedDevice):
    """As on CUDA, where backward only queues its kernels."""

    def __init__(self, without=()):
        super().__init__(ADAM, Faults(without=frozenset(without)))
        self.caller = emulated._ThreadLane("caller", Faults())

    def record_caller(self):
        return self.caller.record()

    def close(self):
        self.caller.close()
        super().close()


@pytest.fixture(autouse=True)
def late_caller():
    """What backward queues is done as late as the waits allow."""
    with late("caller"):
        yield


ONE_TILE = Schedule.make([64], "all-device", 1, 1.0, 64)


def executor_of(schedule, device):
    return Executor(schedule, Types(torch.float32, torch.float32), device, ADAM, 2)


def weights_that_backward_reads(without, policy, on_host=False):
    """What a backward that is still running reads while the update is launched."""
    device, read = AsynchronousCaller(without), []
    ratio = 0.0 if policy == "ratio" else 1.0
    schedule = Schedule.make([256], policy, 1, ratio, 64)
    schedule = dataclasses.replace(schedule, weights_on_host=on_host)
    executor = executor_of(schedule, device)
    tensors = AdamTensors(*(torch.ones(256) for _ in range(5)))
    device.caller.submit("backward", lambda: read.append(tensors.weights.clone()))
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
    return read[0]


WHERE = pytest.mark.parametrize("on_host", [False, True], ids=["on the device", "on the host"])
KEPT = "kept", "left out"
"""The second is the negative control."""


@WHERE
@pytest.mark.parametrize("without", [(), (Wait.WEIGHTS_IDLE,)], ids=KEPT)
@pytest.mark.parametrize("policy", ["all-host", "all-device", "ratio"])
def test_weights_are_written_only_after_backward_has_read_them(policy, without, on_host):
    read = weights_that_backward_reads(without, policy, on_host)
    assert torch.equal(read, torch.ones(256)) == (not without)


@pytest.mark.parametrize("without", [(), (Wait.WEIGHTS_IDLE,)], ids=KEPT)
def test_slots_are_filled_only_after_the_caller_has_left_their_memory(without):
    """An allocator may hand out memory that kernels of the caller still use."""
    device, done = AsynchronousCaller(without), []
    device.caller.submit("backward", lambda: done.append("backward"))
    executor = executor_of(ONE_TILE, device)
    executor.follow(executor.caller_events())
    device.h2d.submit("prefetch", lambda: done.append("prefetch"))
    device.close()
    assert done == (["prefetch", "backward"] if without else ["backward", "prefetch"])


@pytest.mark.parametrize("without", [(), (Wait.GRAD_READY,)], ids=KEPT)
def test_a_gradient_is_flushed_only_after_backward_has_reduced_it(without):
    device, home = AsynchronousCaller(without), torch.zeros(8)
    device.caller.submit("reduction", lambda: None)
    Flusher(device, [home]).flush(0, torch.ones(8))
    assert home.any() == bool(without)
    device.synchronize()
    assert home.all()
    device.close()


@pytest.mark.parametrize("without", [(), (Wait.MEMORY_IDLE,)], ids=KEPT)
def test_state_sent_ahead_comes_only_after_the_caller_has_left_its_memory(without):
    device = AsynchronousCaller(without)
    device.caller.submit("backward", lambda: None)
    executor = executor_of(ONE_TILE, device)
    executor.send_ahead(0, "tile 0", [torch.ones(64) for _ in range(3)])
    assert executor.num_under_way_ahead == (0 if without else 1)
    device.synchronize()
    assert executor.num_under_way_ahead == 0
    device.close()


def test_memory_that_is_dropped_is_not_handed_out_before_the_copy_into_it_is_over():
    """The lane is named to the allocator."""
    device, used = AsynchronousCaller(), []
    executor = executor_of(ONE_TILE, device)
    submit = device.h2d.submit
    device.h2d.submit = lambda what, work, uses=(): (used.extend(uses), submit(what, work))
    executor.send_ahead(0, "tile 0", [torch.ones(64) for _ in range(3)])
    device.synchronize()
    device.close()
    assert [tensor.data_ptr() for tensor in used] == [
        tensor.data_ptr() for tensor in executor._ahead[0].tensors
    ]
