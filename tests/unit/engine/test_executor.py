"""Ordering rules on the emulated device: equal with every wait, different without one."""

import dataclasses
import threading

import pytest
import torch
from engine_updates import (
    ADAM,
    GROUP,
    NUMELS,
    SCHEDULES,
    TAIL,
    WEIGHTS_ON_HOST,
    first_scalars,
    make_executor,
    make_scalars,
    make_schedule,
    make_subgroups,
    make_work,
    run_once,
)
from hypothesis import given, settings, strategies as st
from late import late

from deep_optimizer_states.core import executor as executor_module
from deep_optimizer_states.core.device import emulated
from deep_optimizer_states.core.device.base import PendingBytes, Wait
from deep_optimizer_states.core.device.emulated import EmulatedDevice, Faults
from deep_optimizer_states.core.executor import Executor, Types
from deep_optimizer_states.core.kernels.adam import BetaPowers
from deep_optimizer_states.core.kernels.host import HostAdam
from deep_optimizer_states.core.policies import RunTimeSplit
from deep_optimizer_states.errors import UpdateError

STEPS = 3
SCHEDULES = SCHEDULES | WEIGHTS_ON_HOST


def run(schedule, faults=None, steps=STEPS):
    """Some steps with gradients that arrive on the gradient lane; every tensor at the end."""
    subgroups = make_subgroups()
    device = EmulatedDevice(ADAM, faults)
    try:
        executor = make_executor(schedule, device)
        powers = BetaPowers(GROUP["betas"])
        generator = torch.Generator().manual_seed(9)
        for step in range(1, steps + 1):
            for subgroup in subgroups:
                value = torch.randn(subgroup.numel, generator=generator).bfloat16()
                home = subgroup.grad
                device.grads.submit("gradient", lambda h=home, v=value: h.copy_(v))
            work = make_work(schedule, subgroups, make_scalars(step, powers))
            run_once(executor, schedule, work)
        device.synchronize()
    finally:
        device.close()
    return torch.cat([t.float() for s in subgroups for t in vars(s).values()])


REFERENCE = run(make_schedule())
RACES = [100 // len(SCHEDULES), pytest.param(1000 // len(SCHEDULES), marks=pytest.mark.exhaustive)]
"""Seeds for each schedule: 100 races in all, and 1,000 by `make test-all`."""
LANES = ["H2D", "GPU", "D2H", "weights", "grads"]


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_any_schedule_gives_the_all_host_result(schedule):
    assert torch.equal(run(schedule), REFERENCE)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("races", RACES)
@pytest.mark.parametrize("name", SCHEDULES)
def test_random_delays_change_nothing(name, races):
    for seed in range(races):
        result = run(SCHEDULES[name], Faults(jitter_s=0.0004, seed=seed), steps=2)
        if seed == 0:
            expected = run(make_schedule(), steps=2)
        assert torch.equal(result, expected), f"seed {seed}"


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["all-host", "ratio", "stride", "all-device", "dynamic"]),
    st.integers(1, 4),
    st.floats(0, 1),
    st.integers(1, 80).map(lambda n: 16 * n),
)
def test_any_plan_uses_slots_only_between_copy_and_flush(policy, stride, ratio, tile_numel):
    """Slots are poisoned before their copy and after their flush: a wrong use gives NaN."""
    schedule = make_schedule(policy, stride, ratio, tile_numel)
    assert torch.equal(run(schedule), REFERENCE)


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_late_lane_changes_nothing(name, lane):
    with late(lane):
        assert torch.equal(run(SCHEDULES[name]), REFERENCE)


CONTROLS = {
    Wait.SLOT_FREE: ("stride 1", "D2H"),
    Wait.PREFETCHED: ("stride 1", "H2D"),
    Wait.STEPPED: ("stride 1", "GPU"),
    Wait.STAGING_FREE: ("all-host, tiles", "weights"),
    Wait.GRADS_FLUSHED: ("all-host, tiles", "grads"),
}
"""Where each wait shows: the schedule, and the lane that must be late."""
CONTROLS_ON_HOST = {
    Wait.SLOT_FREE: ("stride 1, weights on the host", "D2H"),
    Wait.PREFETCHED: ("stride 1, weights on the host", "H2D"),
    Wait.STEPPED: ("ratio, tiles, weights on the host", "GPU"),
    Wait.STAGING_FREE: ("ratio, tiles, weights on the host", "D2H"),
    Wait.GRADS_FLUSHED: ("all-host, tiles, weights on the host", "grads"),
}
"""The same where the CPU writes weights to their home, and the device sends them back."""


@pytest.mark.parametrize(
    ("wait", "where"), [*CONTROLS.items(), *CONTROLS_ON_HOST.items()], ids=lambda value: str(value)
)
def test_without_a_wait_the_result_differs(wait, where):
    """Negative control of every ordering rule inside the update phase."""
    name, lane = where
    with late(lane):
        result = run(SCHEDULES[name], Faults(without=frozenset({wait})))
    assert not torch.equal(result, REFERENCE)


def test_the_dynamic_split_is_recorded_as_a_plan():
    schedule = make_schedule("dynamic", tile_numel=64)
    device = EmulatedDevice(ADAM)
    executor = make_executor(schedule, device)
    work = make_work(schedule, make_subgroups(), first_scalars())
    run_once(executor, schedule, work)
    device.close()
    plan = executor.last_plan
    assert sorted(plan.device_tiles + plan.host_tiles) == list(range(len(schedule.tiles)))
    assert len(plan.device_tiles) >= 3
    assert plan.host_tiles


class Clock:
    """A clock that goes on only where it is told to."""

    def __init__(self):
        self.now_s = 0.0

    def perf_counter(self):
        return self.now_s

    def time(self, owner, name, seconds):
        """Each call of a method, or each piece of work submitted to a lane, takes so long."""
        call = getattr(owner, name)

        def later(work):
            self.now_s += seconds
            return work()

        if name == "submit":
            setattr(owner, name, lambda what, work, uses=(): call(what, lambda: later(work), uses))
        else:
            setattr(owner, name, lambda *given: later(lambda: call(*given)))


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    for module in (executor_module, emulated):
        monkeypatch.setattr(module, "time", clock)
    return clock


def test_the_device_is_given_a_tile_for_every_slot_and_no_more_until_one_is_flushed(clock):
    numels = [512] * 8
    schedule = make_schedule("dynamic", numels=numels)
    with late("GPU"):
        device, host_adam = EmulatedDevice(ADAM), HostAdam(TAIL.mode)
        clock.time(device.compute, "submit", 100.0)
        clock.time(host_adam, "step", 1.0)
        executor = make_executor(schedule, device)
        executor._host_adam = host_adam
        work = make_work(schedule, make_subgroups(numels), first_scalars())
        run_once(executor, schedule, work)
        assert executor.last_plan.device_tiles == (0, 1, 2)
        assert executor.last_plan.host_tiles == (3, 4, 5, 6, 7)
        run_once(executor, schedule, work)
        assert executor.last_plan.device_tiles == (), "it was measured to be slow"
        device.close()


def test_the_split_learns_of_each_update_by_itself(monkeypatch):
    schedule, seen = make_schedule("dynamic", tile_numel=64), []
    device = EmulatedDevice(ADAM)
    executor = make_executor(schedule, device)

    def learn(self, steps, flights, seconds):
        seen.append(sum(step.numel for step in steps) + sum(flight.numel for flight in flights))
        assert all(0 <= flight.begin_s <= flight.end_s <= seconds for flight in flights)

    monkeypatch.setattr(RunTimeSplit, "learn", learn)
    work = make_work(schedule, make_subgroups(), first_scalars())
    for _ in range(3):
        run_once(executor, schedule, work)
    device.close()
    assert seen == [sum(NUMELS)] * 3


def test_a_flight_begins_with_its_prefetch_and_not_with_its_step(monkeypatch, clock):
    numels, flights = [512] * 8, []
    schedule = make_schedule("dynamic", numels=numels)
    monkeypatch.setattr(RunTimeSplit, "learn", lambda self, steps, seen, s: flights.extend(seen))

    def on_issued(tile, event):
        clock.now_s += 0.1

    with late("GPU"):
        device = EmulatedDevice(ADAM)
        executor = make_executor(schedule, device)
        work = make_work(schedule, make_subgroups(numels), first_scalars())
        run_once(executor, schedule, work, on_issued)
        device.close()
    assert [flight.begin_s for flight in flights] == pytest.approx([0.0, 0.1, 0.2])
    assert [flight.end_s for flight in flights] == pytest.approx([0.8] * 3)


def test_weights_that_leave_slowly_make_the_next_update_one_of_the_cpu_alone(clock):
    numels = [512] * 30
    schedule = make_schedule("dynamic", numels=numels)
    with late("GPU", "weights"):
        device = EmulatedDevice(ADAM)
        clock.time(device.compute, "submit", 0.03)
        clock.time(device.weights, "submit", 0.06)
        executor = make_executor(schedule, device)
        work = make_work(schedule, make_subgroups(numels), first_scalars())
        run_once(executor, schedule, work)
        assert executor.last_plan.device_tiles
        assert executor.last_plan.host_tiles
        run_once(executor, schedule, work)
        assert executor.last_plan.device_tiles == ()
        device.close()


@pytest.mark.parametrize("on_host", [False, True], ids=["on the device", "on the host"])
@pytest.mark.parametrize("policy", ["all-host", "all-device", "ratio"])
def test_a_tile_is_announced_with_the_event_after_which_its_weights_are_written(policy, on_host):
    schedule = make_schedule(policy, ratio=0.0 if policy == "ratio" else 1.0, tile_numel=256)
    schedule = dataclasses.replace(schedule, weights_on_host=on_host)
    device, subgroups = EmulatedDevice(ADAM, Faults(jitter_s=0.004)), make_subgroups()
    for subgroup in subgroups:
        subgroup.grad.zero_()
    work = make_work(schedule, subgroups, first_scalars())
    announced, unwritten = [], []

    def on_issued(tile, event):
        announced.append(tile)
        event.synchronize()
        if work[tile].tensors.weights.isnan().any():
            unwritten.append(tile)

    run_once(make_executor(schedule, device), schedule, work, on_issued)
    device.close()
    assert sorted(announced) == list(range(len(schedule.tiles)))
    assert unwritten == []


def test_memory_of_the_device_is_bounded():
    """Three slots of the largest tile, and two outboxes of the largest resident one."""
    device, taken = EmulatedDevice(ADAM), []
    take = device.empty_device
    device.empty_device = lambda numel, dtype: (
        taken.append(numel * dtype.itemsize) or take(numel, dtype)
    )
    make_executor(make_schedule("all-device", tile_numel=256), device)
    assert sum(taken) == 3 * 256 * (4 + 4 + 4 + 2)
    taken.clear()
    schedule = make_schedule("stride", ratio=0.5, tile_numel=256)
    make_executor(dataclasses.replace(schedule, weights_on_host=True), device)
    assert sum(taken) == 3 * 256 * (4 + 4 + 4 + 2 + 2) + 2 * 256 * 2
    device.close()


def test_weights_in_host_memory_are_written_there_before_the_state_is_flushed():
    """A forward that waits for a tile's weights does not wait for its state."""
    schedule = WEIGHTS_ON_HOST["stride 1, weights on the host"]
    device, subgroups = EmulatedDevice(ADAM), make_subgroups()
    for subgroup in subgroups:
        subgroup.grad.zero_()
    submit, order = device.d2h.submit, []
    device.d2h.submit = lambda what, work, uses=(): (
        order.append(what.split()[0]),
        submit(what, work),
    )[1]
    run_once(
        make_executor(schedule, device), schedule, make_work(schedule, subgroups, first_scalars())
    )
    device.close()
    assert order == ["weights", "state", "poisoning"] * len(schedule.tiles)


class FailingAdam(HostAdam):
    def step(self, *args, **kwargs):
        raise RuntimeError("out of luck")


def test_failure_on_a_lane_names_lane_and_work():
    device = EmulatedDevice(FailingAdam(TAIL.mode))
    schedule = make_schedule("all-device")
    executor = make_executor(schedule, device)
    work = make_work(schedule, make_subgroups(), first_scalars())
    with pytest.raises(UpdateError, match=r"lane GPU, step of tile 0.*out of luck"):
        run_once(executor, schedule, work)
    device.close()


def test_failure_of_the_host_kernel_names_lane_and_work():
    device, schedule = EmulatedDevice(ADAM), make_schedule()
    types = Types(torch.bfloat16, torch.bfloat16)
    executor = Executor(schedule, types, device, FailingAdam(TAIL.mode), 2)
    work = make_work(schedule, make_subgroups(), first_scalars())
    with pytest.raises(UpdateError, match=r"lane CPU, step of tile 0.*out of luck"):
        run_once(executor, schedule, work)
    device.close()


@pytest.mark.parametrize("failing", ["CPU", "GPU"])
def test_nothing_is_written_after_an_update_that_failed_has_ended(failing, monkeypatch):
    """State may be loaded anew as soon as the failure is known; slow lanes must not land in it."""
    with late("H2D" if failing == "CPU" else "weights") as world:
        device = EmulatedDevice(ADAM)
        schedule, subgroups = make_schedule("stride", 2), make_subgroups()
        executor = make_executor(schedule, device)
        broken = (executor, "_host_adam") if failing == "CPU" else (device, "_adam")
        monkeypatch.setattr(*broken, FailingAdam(TAIL.mode))
        for subgroup in subgroups:
            subgroup.grad.fill_(1)
        with pytest.raises(UpdateError, match=f"lane {failing}.*out of luck"):
            run_once(executor, schedule, make_work(schedule, subgroups, first_scalars()))
        for subgroup in subgroups:
            for tensor in vars(subgroup).values():
                tensor.fill_(7)  # as loading a checkpoint does
        world.finish()
        assert all((tensor == 7).all() for s in subgroups for tensor in vars(s).values())


def test_an_update_waits_for_the_gradients_submitted_before_it():
    device, release = EmulatedDevice(ADAM), threading.Event()
    device.grads.submit("a gradient", lambda: release.wait(3600))
    grads = make_executor(make_schedule(), device).caller_events()[1]
    device.d2h.record().synchronize()
    assert not grads.reached()
    release.set()
    grads.synchronize()
    device.close()


def test_waits_are_bounded():
    device = EmulatedDevice(ADAM, Faults(timeout_s=0.2))
    release = threading.Event()
    device.h2d.submit("a copy that hangs", lambda: release.wait(3600))
    with pytest.raises(UpdateError, match=r"0.2 s for lane H2D \(a copy that hangs\)"):
        device.synchronize()
    release.set()
    device.close()


def test_close_ends_every_thread():
    before = set(threading.enumerate())
    device = EmulatedDevice(ADAM)
    assert len(set(threading.enumerate()) - before) == 5
    device.close()
    assert set(threading.enumerate()) - before == set()


def test_a_closed_device_refuses_work_at_once():
    device = EmulatedDevice(ADAM)
    device.close()
    with pytest.raises(UpdateError, match="lane H2D was closed"):
        device.synchronize()


def test_copies_in_flight_are_bounded():
    pending, copied = PendingBytes(limit=100), []
    with late("grads"):
        device = EmulatedDevice(ADAM)
        for number, expected in enumerate([[], [], [0], [0, 1]]):
            device.grads.submit(f"copy {number}", lambda number=number: copied.append(number))
            pending.add(device.grads.record(), 40)
            assert copied == expected, "the third copy has to wait for the first"
        device.close()
