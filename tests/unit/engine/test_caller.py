"""Rules against the caller's own asynchronous work: a device whose caller is a lane as well."""

import pytest
from engine_updates import (
    ADAM,
    make_cache,
    make_executor,
    make_schedule,
    make_subgroups,
    send_ahead,
)
from late import late

from deep_optimizer_states.core.device import emulated
from deep_optimizer_states.core.device.base import Wait
from deep_optimizer_states.core.device.emulated import EmulatedDevice, Faults


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


def executor_of(device):
    return make_executor(make_schedule("all-device", numels=[64]), device)


KEPT = "kept", "left out"
"""The second is the negative control."""


@pytest.mark.parametrize("without", [(), (Wait.WEIGHTS_IDLE,)], ids=KEPT)
def test_slots_are_filled_only_after_the_caller_has_left_their_memory(without):
    """An allocator may hand out memory that kernels of the caller still use."""
    device, done = AsynchronousCaller(without), []
    device.caller.submit("backward", lambda: done.append("backward"))
    executor = executor_of(device)
    executor.follow(executor.caller_events())
    device.h2d.submit("prefetch", lambda: done.append("prefetch"))
    device.close()
    assert done == (["prefetch", "backward"] if without else ["backward", "prefetch"])


def sent_ahead(device):
    """A cache whose first tile was sent ahead."""
    cache = make_cache(make_schedule("all-device", numels=[64]), device, make_subgroups([64]))
    send_ahead(cache, [0])
    return cache


@pytest.mark.parametrize("without", [(), (Wait.MEMORY_IDLE,)], ids=KEPT)
def test_state_sent_ahead_comes_only_after_the_caller_has_left_its_memory(without):
    device = AsynchronousCaller(without)
    device.caller.submit("backward", lambda: None)
    place = sent_ahead(device).place(0)
    assert place.filled.reached() == bool(without)
    device.synchronize()
    assert place.filled.reached()
    device.close()


def test_memory_that_is_dropped_is_not_handed_out_before_the_copy_into_it_is_over():
    """The lane is named to the allocator."""
    device, used = AsynchronousCaller(), []
    submit = device.h2d.submit
    device.h2d.submit = lambda what, work, uses=(): (used.extend(uses), submit(what, work))
    place = sent_ahead(device).place(0)
    device.synchronize()
    device.close()
    assert [tensor.data_ptr() for tensor in used] == [it.data_ptr() for it in place.tensors]
