"""Tiles that an update gets before ``step()``, and those that it gets from it."""

import subprocess
import sys
import threading

import pytest
from engine_updates import (
    ADAM,
    first_scalars,
    make_executor,
    make_schedule,
    make_subgroups,
    make_work,
    run_handover,
    start_thread,
)

from deep_optimizer_states.core.device.base import Reached
from deep_optimizer_states.core.device.emulated import EmulatedDevice
from deep_optimizer_states.core.schedule import AllAtOnce
from deep_optimizer_states.core.update import Handover
from deep_optimizer_states.errors import UpdateError

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
    # A tile that was given before stays: its gradient may be on the device alone.
    handover.give_rest(end, host_tiles={0, 4})
    assert not handover.is_open
    assert handover.host_tiles == {0}
    assert handover.take(wait=False) == [2, 0, 1, 3]
    assert handover.take(wait=True) == ()
    assert followed == [NOW, NOW, end]


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


class Updated:
    """An update of some subgroups on a device made here, and all that it needs."""

    def __init__(self, **options):
        self.schedule, self.subgroups = make_schedule(**options), make_subgroups()
        if "numels" in options:
            self.subgroups = make_subgroups(options["numels"])
        for subgroup in self.subgroups:
            subgroup.grad.zero_()
        self.device = EmulatedDevice(ADAM)
        self.executor = make_executor(self.schedule, self.device)
        self.work = make_work(self.schedule, self.subgroups, first_scalars())

    def handover(self, order=None):
        order = range(len(self.work)) if order is None else order
        return Handover(order, self.executor.claimed, self.executor.follow)

    def send_ahead(self, number):
        for tile in range(number):
            self.executor.send_ahead(tile, str(tile), self.work[tile].tensors.state)

    def run(self, handover, *on_issued):
        run_handover(self.executor, self.schedule, handover, self.work, *on_issued)
        return self.executor.last_plan

    def run_rest(self, **options):
        """Claim all and run at once."""
        handover = self.handover()
        self.executor.claim(range(len(self.work)))
        handover.give_rest(self.executor.caller_events(), **options)
        return self.run(handover)


@pytest.fixture
def make_update():
    made = []

    def make(**options):
        made.append(Updated(**options))
        return made[-1]

    yield make
    for update in made:
        update.device.close()


def test_what_waits_is_stepped_in_the_order_in_which_the_next_forward_needs_it(make_update):
    update = make_update()
    handover = update.handover([3, 1, 0, 2, 4, 5, 6, 7])
    handover.give([5, 2, 1], NOW)
    handover.give_rest(NOW)
    assert update.run(handover).host_tiles == (3, 1, 0, 2, 4, 5, 6, 7)


def test_the_plan_says_what_ran_before_the_norm_was_known(make_update):
    update, issued = make_update(numels=[64] * 4), threading.Semaphore(0)
    handover = update.handover()
    handover.give([2, 3], update.executor.caller_events())
    join = start_thread(lambda: update.run(handover, lambda tile, event: issued.release()))
    assert all(issued.acquire(timeout=3600) for _ in range(2))
    handover.give_rest(update.executor.caller_events())
    join()
    assert str(update.executor.last_plan) == "2CPU 2WTS 3CPU 3WTS | 0CPU 0WTS 1CPU 1WTS"


def test_what_was_sent_ahead_of_a_tile_that_must_stay_at_home_is_not_used(make_update):
    update = make_update(tile_numel=64)
    update.send_ahead(4)
    plan = update.run_rest(host_tiles={1, 2})
    assert plan.device_tiles == (0, 3)
    assert str(plan).startswith("0AHD 3AHD | 0H2D")
    assert not update.executor.claimed
    assert not list(update.executor.away)


def test_state_that_is_dropped_is_not_used(make_update):
    update = make_update()
    update.send_ahead(1)
    update.device.synchronize()
    update.subgroups[0].master.fill_(3.0)
    update.executor.drop_ahead()
    assert update.run_rest().device_tiles == ()
    assert (update.subgroups[0].master - 3.0).abs().max() < 0.5


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
