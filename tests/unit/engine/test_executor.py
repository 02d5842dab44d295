"""Ordering rules on the emulated device: equal with every wait, different without one."""

import dataclasses
import functools
import gc
import sys
import threading

import pytest
import torch
from engine_updates import (
    ADAM,
    NUMELS,
    SCHEDULES,
    TAIL,
    Setup,
    make_cache,
    make_executor,
    make_schedule,
    make_subgroups,
    start_thread,
    train,
)
from hypothesis import given, settings, strategies as st
from late import late

from deep_optimizer_states.core import executor as executor_module
from deep_optimizer_states.core.device import emulated
from deep_optimizer_states.core.device.base import PendingBytes, Wait
from deep_optimizer_states.core.device.emulated import EmulatedDevice, Faults
from deep_optimizer_states.core.kernels.host import HostAdam
from deep_optimizer_states.core.plan import Kind
from deep_optimizer_states.core.policies import RunTimeSplit
from deep_optimizer_states.errors import UpdateError

REFERENCE, SHORT = train(make_schedule())[0], train(make_schedule(), steps=2)[0]


@functools.cache
def reference(steps):
    return train(make_schedule(), steps=steps)[0]


RACES = [2, pytest.param(1000 // len(SCHEDULES), marks=pytest.mark.exhaustive)]
"""Seeds for each schedule, with its tiles at once and in parts; `make test-all` has 1,980 races."""
LANES = ["H2D", "GPU", "D2H", "weights", "grads"]


def grow_and_shrink(cache, step):
    """Bring all, some or no tiles home."""
    (cache.release, cache.flush, lambda: cache.release(range(0, 40, 3)))[step % 3]()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"parts": 3},
        {"parts": 3, "ahead": 5},
        {"ahead": 5},
        {"stays": 100},
        {"stays": 3, "ahead": 5, "move": grow_and_shrink, "steps": 5},
        {"parts": 3, "stays": 100, "move": grow_and_shrink, "steps": 5},
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("name", SCHEDULES)
def test_any_schedule_gives_the_all_host_result(name, options):
    """Whether its tiles come at once or in parts, and whatever is on the device."""
    result, plans = train(SCHEDULES[name], **options)
    assert torch.equal(result, reference(options.get("steps", 3)))
    has_room = bool(make_cache(SCHEDULES[name], EmulatedDevice(ADAM))._candidates)
    for plan in plans:
        sent = [action.tile for action in plan.actions if action.kind is Kind.AHEAD]
        assert set(sent) <= set(plan.device_tiles)
    if has_room and "ahead" in options:
        assert "AHD" in str(plans[0])
    if has_room and options == {"stays": 100}:
        movable = {*range(len(SCHEDULES[name].tiles))} - SCHEDULES[name].resident_tiles
        device = SCHEDULES[name].device_tiles or movable
        assert set(plans[0].device_tiles) >= device
        assert not plans[1].device_tiles, "nothing of it moves any more"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("in_parts", [False, True], ids=["at once", "in parts"])
@pytest.mark.parametrize("races", RACES)
@pytest.mark.parametrize("name", SCHEDULES)
def test_random_delays_change_nothing(name, races, in_parts):
    for seed in range(races):
        faults = Faults(jitter_s=0.0004, seed=seed)
        options = {"parts": 1 + seed % 4, "ahead": seed % 7} if in_parts else {}
        if seed % 3 == 1:
            options |= {"stays": seed % 11, "move": grow_and_shrink}
        result, _ = train(SCHEDULES[name], faults, steps=2, **options)
        assert torch.equal(result, SHORT), f"seed {seed}"


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(["all-host", "ratio", "stride", "all-device", "dynamic"]),
    st.integers(1, 4),
    st.floats(0, 1),
    st.integers(1, 80).map(lambda n: 16 * n),
    st.integers(0, 6),
    st.integers(0, 9),
)
def test_any_plan_uses_slots_only_between_copy_and_flush(
    policy, stride, ratio, tile_numel, parts, ahead
):
    """Slots are poisoned before their copy and after their flush: a wrong use gives NaN."""
    schedule = make_schedule(policy, stride, ratio, tile_numel)
    result, _ = train(schedule, parts=parts, ahead=ahead if parts else 0)
    assert torch.equal(result, REFERENCE)


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_late_lane_changes_nothing(name, lane):
    with late(lane):
        assert torch.equal(train(SCHEDULES[name])[0], REFERENCE)


CONTROLS = [
    # Tiles that stay on the device are brought home before each step.
    (Wait.HOME_WHOLE, "all-host, tiles", "D2H", 0, 0),
    (Wait.SLOT_FREE, "stride 1", "D2H", 0, 0),
    (Wait.PREFETCHED, "stride 1", "H2D", 0, 0),
    (Wait.STEPPED, "stride 1", "GPU", 0, 0),
    (Wait.STAGING_FREE, "all-host, tiles", "weights", 0, 0),
    (Wait.GRADS_FLUSHED, "all-host, tiles", "grads", 0, 0),
    # The CPU writes weights to their home, and the device sends them back.
    (Wait.SLOT_FREE, "stride 1, weights on the host", "D2H", 0, 0),
    (Wait.PREFETCHED, "stride 1, weights on the host", "H2D", 0, 0),
    (Wait.STEPPED, "ratio, tiles, weights on the host", "GPU", 0, 0),
    (Wait.STAGING_FREE, "ratio, tiles, weights on the host", "D2H", 0, 0),
    (Wait.GRADS_FLUSHED, "all-host, tiles, weights on the host", "grads", 0, 0),
    # Tiles come in parts. Fresh memory holds NaN, and so does what was flushed.
    (Wait.PREFETCHED, "all-device", "H2D", 3, 8),
    (Wait.STEPPED, "all-device", "GPU", 3, 8),
    (Wait.GRADS_FLUSHED, "all-host, tiles", "grads", 3, 0),
]
"""Where each wait shows: the schedule, the lane that must be late, parts, tiles sent ahead."""


@pytest.mark.parametrize("is_kept", [True, False], ids=["kept", "left out"])
@pytest.mark.parametrize(("wait", "name", "lane", "parts", "ahead"), CONTROLS)
def test_without_a_wait_the_result_differs(wait, name, lane, parts, ahead, is_kept):
    """Negative control of every ordering rule inside the update phase."""
    faults = Faults(without=frozenset() if is_kept else frozenset({wait}))
    with late(lane) as world:
        start = world.add_update if parts else start_thread
        moving = {"stays": 100, "move": lambda cache, step: cache.release()}
        options = moving if wait is Wait.HOME_WHOLE else {"parts": parts, "ahead": ahead}
        result, _ = train(SCHEDULES[name], faults, start=start, **options)
    assert torch.equal(result, REFERENCE) == is_kept


@pytest.mark.parametrize("is_kept", [True, False], ids=["kept", "left out"])
@pytest.mark.parametrize("policy", ["stride", "dynamic"])
def test_no_prefetch_overtakes_weights_that_were_sent_before_it_was_issued(policy, is_kept):
    """A GPU's link would let prefetches go first, one after the other, and the CPU would wait."""
    under_way, overtaking = set(), []

    def send(what, work, uses=()):
        under_way.add(what)
        submit(what, lambda: (work(), under_way.remove(what)))

    def fetch(what, work, uses=()):
        sent = frozenset(under_way)
        submit_fetch(what, lambda: (work(), overtaking.extend(sent & under_way)), uses)

    with late("weights", "D2H"):  # or all of the device's tiles have room at once
        faults = Faults(without=frozenset() if is_kept else frozenset({Wait.WEIGHTS_FIRST}))
        device = EmulatedDevice(ADAM, faults)
        submit, submit_fetch = device.weights.submit, device.h2d.submit
        device.weights.submit, device.h2d.submit = send, fetch
        schedule = make_schedule(policy, 2, tile_numel=16)
        Setup(schedule, device, subgroups_with_gradients()).update()
        device.close()
    assert bool(overtaking) != is_kept


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


def dynamic(num_tiles, host_adam=ADAM):
    """Updates by the dynamic split, of tiles of 512 elements, on a device made here."""
    numels = [512] * num_tiles
    schedule, device = make_schedule("dynamic", numels=numels), EmulatedDevice(ADAM)
    return Setup(schedule, device, make_subgroups(numels), host_adam)


def test_the_device_is_given_a_tile_for_every_slot_and_no_more_until_one_is_flushed(clock):
    with late("GPU"):
        host_adam = HostAdam(TAIL.mode)
        clock.time(host_adam, "step", 1.0)
        updates = dynamic(8, host_adam)
        clock.time(updates.device.compute, "submit", 100.0)
        plan = updates.update()
        assert (plan.device_tiles, plan.host_tiles) == ((0, 1, 2), (3, 4, 5, 6, 7))
        assert updates.update().device_tiles == (), "it was measured to be slow"
        updates.device.close()


def test_the_split_learns_of_each_update_by_itself(monkeypatch, clock):
    """And a flight begins with its prefetch, not with its step."""
    seen = []
    monkeypatch.setattr(
        RunTimeSplit, "learn", lambda self, steps, flights, s: seen.append((steps, flights))
    )

    def on_issued(tile, event):
        clock.now_s += 0.1

    with late("GPU"):
        updates = dynamic(8)
        for _ in range(3):
            begin_s = clock.now_s
            updates.update(on_issued)
            steps, flights = seen.pop()
            assert [f.begin_s for f in flights] == pytest.approx([0.0, 0.1, 0.2])
            assert [f.end_s for f in flights] == pytest.approx([clock.now_s - begin_s] * 3)
            assert sum(one.numel for one in (*steps, *flights)) == 8 * 512
        updates.device.close()


def test_weights_that_leave_slowly_make_the_next_update_one_of_the_cpu_alone(clock):
    with late("GPU", "weights"):
        updates = dynamic(30)
        clock.time(updates.device.compute, "submit", 0.03)
        clock.time(updates.device.weights, "submit", 0.06)
        plan = updates.update()
        assert plan.device_tiles
        assert plan.host_tiles
        assert updates.update().device_tiles == ()
        updates.device.close()


def subgroups_with_gradients():
    subgroups = make_subgroups()
    for subgroup in subgroups:
        subgroup.grad.fill_(1)
    return subgroups


@pytest.mark.parametrize("on_host", [False, True], ids=["on the device", "on the host"])
@pytest.mark.parametrize("policy", ["all-host", "all-device", "ratio"])
def test_a_tile_is_announced_with_the_event_after_which_its_weights_are_written(policy, on_host):
    schedule = make_schedule(policy, ratio=0.0 if policy == "ratio" else 1.0, tile_numel=256)
    schedule = dataclasses.replace(schedule, weights_on_host=on_host)
    device, subgroups = EmulatedDevice(ADAM, Faults(jitter_s=0.004)), subgroups_with_gradients()
    announced, unwritten = [], []

    def on_issued(tile, event):
        announced.append(tile)
        event.synchronize()
        place = schedule.tiles[tile]
        if subgroups[place.subgroup].narrow(place.start, place.numel).weights.isnan().any():
            unwritten.append(tile)

    Setup(schedule, device, subgroups).update(on_issued)
    device.close()
    assert sorted(announced) == list(range(len(schedule.tiles)))
    assert unwritten == []


def test_memory_of_the_device_is_bounded(device):
    """Three slots of the largest tile, and two outboxes of the largest resident one."""
    taken, take = [], device.empty_device
    device.empty_device = lambda numel, dtype: (
        taken.append(numel * dtype.itemsize) or take(numel, dtype)
    )
    make_executor(make_schedule("all-device", tile_numel=256), device)
    assert sum(taken) == 3 * 256 * (4 + 4 + 4 + 2)
    taken.clear()
    schedule = make_schedule("stride", ratio=0.5, tile_numel=256)
    make_executor(dataclasses.replace(schedule, weights_on_host=True), device)
    assert sum(taken) == 3 * 256 * (4 + 4 + 4 + 2 + 2) + 2 * 256 * 2


def test_weights_in_host_memory_are_written_there_before_the_state_is_flushed(device):
    """A forward that waits for a tile's weights does not wait for its state."""
    submit, order = device.d2h.submit, []
    device.d2h.submit = lambda what, work, uses=(): (
        order.append(what.split()[0]),
        submit(what, work),
    )[1]
    Setup(SCHEDULES["stride 1, weights on the host"], device, subgroups_with_gradients()).update()
    assert order == ["weights", "state", "poisoning"] * len(NUMELS)


class FailingAdam(HostAdam):
    def step(self, *args, **kwargs):
        raise RuntimeError("out of luck")


FAILING = FailingAdam(TAIL.mode)


@pytest.mark.parametrize("failing", ["CPU", "GPU"])
def test_a_failure_names_lane_and_tile_and_nothing_is_written_after_it(failing):
    """State may be loaded anew as soon as it is known; slow lanes must not land in it."""
    with late("H2D" if failing == "CPU" else "weights") as world:
        device = EmulatedDevice(FAILING if failing == "GPU" else ADAM)
        subgroups = subgroups_with_gradients()
        host_adam = FAILING if failing == "CPU" else ADAM
        with pytest.raises(UpdateError, match=f"lane {failing}, step of tile .*out of luck"):
            Setup(make_schedule("stride", 2), device, subgroups, host_adam).update()
        for subgroup in subgroups:
            for tensor in vars(subgroup).values():
                tensor.fill_(7)  # as loading a checkpoint does
        world.finish()
        assert all((tensor == 7).all() for s in subgroups for tensor in vars(s).values())


def test_waits_are_bounded():
    device = EmulatedDevice(ADAM, Faults(timeout_s=0.2))
    release = threading.Event()
    device.h2d.submit("a copy that hangs", lambda: release.wait(3600))
    with pytest.raises(UpdateError, match=r"0.2 s for lane H2D \(a copy that hangs\)"):
        device.synchronize()
    release.set()
    device.close()


def test_close_ends_every_thread_and_a_closed_device_refuses_work_at_once():
    before = set(threading.enumerate())
    device = EmulatedDevice(ADAM)
    assert len(set(threading.enumerate()) - before) == len(LANES)
    device.close()
    assert set(threading.enumerate()) - before == set()
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


UPDATES = 60
FEW = ["stride 2, tiles", "dynamic and ratio, tiles, weights on the host"]
"""Every kind of action is in one of these; the others repeat them in other proportions."""


def things_held():
    """Objects that Python's collector knows, threads, and allocated blocks."""
    gc.collect()
    return len(gc.get_objects()), threading.active_count(), sys.getallocatedblocks()


@pytest.mark.parametrize("name", FEW)
def test_many_updates_keep_nothing_that_a_few_do_not(device, name):
    setup = Setup(SCHEDULES[name], device)
    for _ in range(UPDATES // 10):
        setup.update()
    objects, threads, blocks = things_held()
    for _ in range(UPDATES):
        setup.update()
    now = things_held()
    # One event kept for each device tile would be hundreds of objects.
    assert now[0] - objects < UPDATES / 2
    assert now[1] == threads
    assert now[2] - blocks < 4 * UPDATES
