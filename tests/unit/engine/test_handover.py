"""Tiles that an update gets before ``step()``, and those that it gets from it."""

import functools
import subprocess
import sys
import threading

import pytest
import torch
from engine_updates import (
    ADAM,
    GROUP,
    SCHEDULES,
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

from deep_optimizer_states.core.device.base import Reached, Wait
from deep_optimizer_states.core.device.emulated import EmulatedDevice, Faults
from deep_optimizer_states.core.kernels.adam import BetaPowers
from deep_optimizer_states.core.plan import Kind, Plan
from deep_optimizer_states.core.schedule import AllAtOnce
from deep_optimizer_states.core.update import Handover
from deep_optimizer_states.errors import UpdateError

SCHEDULES = SCHEDULES | WEIGHTS_ON_HOST
NOW = (Reached(), Reached())


class Later:
    """An event that is reached when somebody says so."""

    def __init__(self):
        self.is_set = False

    def reached(self):
        return self.is_set


def made(num_tiles=6, **options):
    followed = []
    return Handover(range(num_tiles), (), followed.append, **options), followed


def test_a_tile_comes_once_and_the_rest_with_the_end():
    handover, followed = made()
    handover.give([4, 5], NOW)
    assert handover.take(wait=True) == [4, 5]
    assert handover.take(wait=False) == []
    assert handover.is_open
    handover.give([2], NOW)
    end = (Reached(), Reached())
    handover.give_rest(end, host_tiles={0})
    assert not handover.is_open
    assert handover.host_tiles == {0}
    assert handover.take(wait=False) == [2, 0, 1, 3]
    assert handover.take(wait=True) == ()
    assert followed == [NOW, NOW, end]


def test_a_tile_that_was_given_before_is_not_sent_home_by_others_of_its_subgroup():
    """Its gradient may be on the device alone."""
    handover, _ = made()
    handover.give([4, 5], NOW)
    handover.give_rest(NOW, host_tiles={3, 4})
    assert handover.host_tiles == {3}


def test_tiles_whose_gradients_are_on_their_way_are_waited_for_only_where_nothing_else_is_left():
    handover, followed = made()
    late = Later()
    handover.give([5], NOW)
    handover.give([4], (Reached(), late))
    assert handover.take(wait=True) == [5]
    assert handover.take(wait=False) == []
    assert followed == [NOW]
    assert handover.take(wait=True) == [4], "the wait itself is the business of `follow`"
    late.is_set = True
    handover.give([3], (Reached(), late))
    assert handover.take(wait=False) == [3]


def test_a_handover_that_is_given_up_ends_with_why():
    handover, _ = made()
    handover.give([1], NOW)
    handover.give_up(UpdateError("a second backward"))
    with pytest.raises(UpdateError, match="a second backward"):
        handover.take(wait=True)


LEFT_OPEN = """
from concurrent.futures import ThreadPoolExecutor
from deep_optimizer_states.core.update import Handover
handover = Handover(range(2), (), print)
ThreadPoolExecutor(1).submit(handover.take, True)
print("over", flush=True)
"""


def test_a_process_that_ends_between_backward_and_step_does_end():
    """Python joins the thread that waits for tiles before it ends."""
    done = subprocess.run(
        [sys.executable, "-c", LEFT_OPEN], timeout=3600, capture_output=True, text=True, check=True
    )
    assert done.stdout == "over\n"


def start_thread(work):
    """Run an update beside the caller; returns what waits for its end."""
    thread = threading.Thread(target=work)
    thread.start()
    return thread.join


def run(schedule, faults=None, steps=3, ahead=0, parts=3, start=start_thread):
    """Some steps whose tiles come in parts, the last first; every tensor at the end.

    Args:
        schedule: Who steps what.
        faults: Of the device.
        steps: How many.
        ahead: How many tiles' state is sent ahead.
        parts: In how many parts they come.
        start: How an update is started.
    """
    subgroups = make_subgroups()
    device = EmulatedDevice(ADAM, faults)
    plans = []
    try:
        executor = make_executor(schedule, device)
        powers = BetaPowers(GROUP["betas"])
        generator = torch.Generator().manual_seed(9)
        for step in range(1, steps + 1):
            work = make_work(schedule, subgroups, make_scalars(step, powers))
            movable = [n for n in range(len(work)) if n not in schedule.resident_tiles]
            for tile in movable[:ahead]:
                executor.send_ahead(tile, str(tile), work[tile].tensors.state)
            values = [torch.randn(s.numel, generator=generator).bfloat16() for s in subgroups]
            known = {}
            handover = Handover(range(len(work)), executor.claimed, executor.follow)
            actions = schedule.actions(handover, executor.share, executor.has_room)
            update = (known, actions, lambda tile, event: None, lambda h=handover: not h.is_open)
            join = start(functools.partial(executor.run, *update))
            order = [n for part in range(parts) for n in range(len(work))[::-1][part::parts]]
            for part in range(parts):
                mine = order[part * len(order) // parts : (part + 1) * len(order) // parts]
                for number in mine:
                    tile = schedule.tiles[number]
                    home = subgroups[tile.subgroup].grad.narrow(0, tile.start, tile.numel)
                    value = values[tile.subgroup].narrow(0, tile.start, tile.numel)
                    device.grads.submit("gradient", lambda h=home, v=value: h.copy_(v))
                executor.claim(mine)
                known.update({number: work[number] for number in mine})
                if part + 1 < parts:
                    handover.give(mine, executor.caller_events())
            handover.give_rest(executor.caller_events())
            join()
            device.synchronize()
            plans.append(executor.last_plan)
    finally:
        device.close()
    return torch.cat([t.float() for s in subgroups for t in vars(s).values()]), plans


def reference(steps=3):
    """The same by an update that gets everything at once, on the CPU alone."""
    subgroups, schedule = make_subgroups(), make_schedule()
    device = EmulatedDevice(ADAM)
    executor, powers = make_executor(schedule, device), BetaPowers(GROUP["betas"])
    generator = torch.Generator().manual_seed(9)
    for step in range(1, steps + 1):
        for subgroup in subgroups:
            subgroup.grad.copy_(torch.randn(subgroup.numel, generator=generator).bfloat16())
        run_once(executor, schedule, make_work(schedule, subgroups, make_scalars(step, powers)))
    device.close()
    return torch.cat([t.float() for s in subgroups for t in vars(s).values()])


REFERENCE, SHORT = reference(), reference(steps=2)


@pytest.mark.parametrize("ahead", [0, 5])
@pytest.mark.parametrize("name", SCHEDULES)
def test_tiles_that_come_in_parts_give_the_bits_of_all_at_once(name, ahead):
    result, plans = run(SCHEDULES[name], ahead=ahead)
    assert torch.equal(result, REFERENCE)
    for plan in plans:
        sent = [action.tile for action in plan.actions if action.kind is Kind.AHEAD]
        assert bool(sent) == bool(ahead)
        assert set(sent) <= set(plan.device_tiles)
        assert Plan.parse(str(plan)) == plan


RACES = [100 // len(SCHEDULES), pytest.param(1000 // len(SCHEDULES), marks=pytest.mark.exhaustive)]
"""Seeds for each schedule: 100 races in all, and 1,000 by `make test-all`."""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("races", RACES)
@pytest.mark.parametrize("name", SCHEDULES)
def test_random_delays_change_nothing(name, races):
    for seed in range(races):
        faults = Faults(jitter_s=0.0004, seed=seed)
        result, _ = run(SCHEDULES[name], faults, 2, seed % 7, 1 + seed % 4)
        assert torch.equal(result, SHORT), f"seed {seed}"


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(["all-host", "ratio", "stride", "all-device", "dynamic"]),
    st.floats(0, 1),
    st.integers(1, 80).map(lambda n: 16 * n),
    st.integers(0, 9),
    st.integers(1, 6),
)
def test_any_parts_of_any_schedule(policy, ratio, tile_numel, ahead, parts):
    schedule = make_schedule(policy, 2, ratio, tile_numel)
    assert torch.equal(run(schedule, ahead=ahead, parts=parts)[0], REFERENCE)


CONTROLS = {
    Wait.PREFETCHED: ("all-device", 8, "H2D"),
    Wait.STEPPED: ("all-device", 8, "GPU"),
    Wait.GRADS_FLUSHED: ("all-host, tiles", 0, "grads"),
}
"""Where each wait shows: the schedule, tiles sent ahead, and the lane that must be late."""


@pytest.mark.parametrize("is_kept", [True, False], ids=["kept", "left out"])
@pytest.mark.parametrize("wait", CONTROLS)
def test_without_a_wait_the_result_differs(wait, is_kept):
    """Negative control. Fresh memory holds NaN, and so does what was flushed."""
    name, ahead, lane = CONTROLS[wait]
    faults = Faults(without=frozenset() if is_kept else frozenset({wait}))
    with late(lane) as world:
        result, _ = run(SCHEDULES[name], faults, ahead=ahead, start=world.add_update)
    assert torch.equal(result, REFERENCE) == is_kept


def test_what_waits_is_stepped_in_the_order_in_which_the_next_forward_needs_it():
    schedule = make_schedule()
    work = make_work(schedule, make_subgroups(), first_scalars())
    device = EmulatedDevice(ADAM)
    executor = make_executor(schedule, device)
    handover = Handover([3, 1, 0, 2, 4, 5, 6, 7], (), lambda after: None)
    handover.give([5, 2, 1], NOW)
    handover.give_rest(NOW)
    actions = schedule.actions(handover, executor.share, executor.has_room)
    executor.run(work, actions, lambda tile, event: None)
    device.close()
    assert executor.last_plan.host_tiles == (3, 1, 0, 2, 4, 5, 6, 7)


def test_the_plan_says_what_ran_before_the_norm_was_known():
    schedule = make_schedule(numels=[64] * 4)
    work = make_work(schedule, make_subgroups([64] * 4), first_scalars())
    device, issued = EmulatedDevice(ADAM), threading.Semaphore(0)
    executor = make_executor(schedule, device)
    handover = Handover(range(4), (), executor.follow)
    handover.give([2, 3], executor.caller_events())
    actions = schedule.actions(handover, executor.share, executor.has_room)
    run = (work, actions, lambda tile, event: issued.release(), lambda: not handover.is_open)
    thread = threading.Thread(target=executor.run, args=run)
    thread.start()
    assert all(issued.acquire(timeout=3600) for _ in range(2))
    handover.give_rest(executor.caller_events())
    thread.join()
    device.close()
    assert str(executor.last_plan) == "2CPU 2WTS 3CPU 3WTS | 0CPU 0WTS 1CPU 1WTS"


def test_what_was_sent_ahead_of_a_tile_that_must_stay_at_home_is_not_used():
    schedule = make_schedule(tile_numel=64)
    device = EmulatedDevice(ADAM)
    executor, subgroups = make_executor(schedule, device), make_subgroups()
    work = make_work(schedule, subgroups, first_scalars())
    for tile in range(4):
        executor.send_ahead(tile, str(tile), work[tile].tensors.state)
    handover = Handover(range(len(work)), executor.claimed, executor.follow)
    executor.claim(range(len(work)))
    handover.give_rest(executor.caller_events(), host_tiles={1, 2})
    actions = schedule.actions(handover, executor.share, executor.has_room)
    executor.run(work, actions, lambda tile, event: None)
    plan = executor.last_plan
    device.close()
    assert plan.device_tiles == (0, 3)
    assert str(plan).startswith("0AHD 3AHD | 0H2D")
    assert not executor.claimed
    assert not list(executor.away)


def test_state_that_is_dropped_is_not_used():
    schedule, subgroups = make_schedule(), make_subgroups()
    for subgroup in subgroups:
        subgroup.grad.zero_()
    device = EmulatedDevice(ADAM)
    executor = make_executor(schedule, device)
    work = make_work(schedule, subgroups, first_scalars())
    executor.send_ahead(0, "0", work[0].tensors.state)
    device.synchronize()
    subgroups[0].master.fill_(3.0)
    executor.drop_ahead()
    executor.claim(range(len(work)))
    handover = Handover(range(len(work)), executor.claimed, executor.follow)
    handover.give_rest(executor.caller_events())
    actions = schedule.actions(handover, executor.share, executor.has_room)
    executor.run(work, actions, lambda tile, event: None)
    device.close()
    assert executor.last_plan.device_tiles == ()
    assert (subgroups[0].master - 3.0).abs().max() < 0.5


def test_tiles_that_are_ahead_wait_for_no_slot_and_for_no_tile_of_the_cpu():
    schedule = make_schedule("stride", 2, numels=[64] * 8)
    asked = []

    def has_room(wait):
        asked.append(wait)
        return wait

    arrivals = AllAtOnce(range(8), ahead={5, 7})
    actions = [str(action) for action in schedule.actions(arrivals, None, has_room)]
    assert actions[:6] == ["5H2D", "5GPU", "5D2H", "7H2D", "7GPU", "7D2H"]
    assert len(asked) == 6, "of the others, and not of these"
