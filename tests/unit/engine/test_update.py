"""Tiles that an update gets before ``step()``, and those that it gets from it."""

import threading
from unittest import mock

import pytest
from engine_updates import Setup, make_schedule, make_subgroups, start_thread

from deep_optimizer_states.core.device.base import Reached
from deep_optimizer_states.core.plan import AHEAD_CHAIN
from deep_optimizer_states.core.schedule import AllAtOnce
from deep_optimizer_states.core.update import Update
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
    return Update(range(num_tiles), lambda tile: (), followed.append, **options), followed


def test_a_tile_comes_once_and_the_rest_with_the_end():
    update, followed = made()
    update.give(dict.fromkeys([4, 5]), NOW)
    assert update.take(wait=True) == [4, 5]
    assert update.take(wait=False) == []
    assert update.is_open
    update.give(dict.fromkeys([2]), NOW)
    end = (Reached(), Reached())
    # A tile that was given before stays: its gradient may be on the device alone.
    update.give_rest(dict.fromkeys([0, 1, 3]), end, host_tiles={0, 4})
    assert not update.is_open
    assert update.host_tiles == {0}
    assert update.take(wait=False) == [2, 0, 1, 3]
    assert update.take(wait=True) == ()
    assert followed == [NOW, NOW, end]


def test_tiles_whose_gradients_are_on_their_way_are_waited_for_only_where_nothing_else_is_left():
    update, followed = made()
    late = Later()
    update.give(dict.fromkeys([5]), NOW)
    update.give(dict.fromkeys([4]), (Reached(), late))
    assert update.take(wait=True) == [5]
    assert update.take(wait=False) == []
    assert followed == [NOW]
    assert update.take(wait=True) == [4], "the wait itself is the business of `follow`"
    late.is_set = True
    update.give(dict.fromkeys([3]), (Reached(), late))
    assert update.take(wait=False) == [3]


def test_what_waits_is_stepped_in_the_order_of_use_and_the_plan_says_what_came_before_the_norm(
    device,
):
    numels = [64] * 4
    setup = Setup(make_schedule(numels=numels), device, make_subgroups(numels))
    update, issued = setup.make_update([1, 0, 3, 2]), threading.Semaphore(0)
    note = update.issued
    update.issued = lambda *given: note(*given) or issued.release()
    update.give({tile: setup.work[tile] for tile in (2, 3)}, NOW)
    join = start_thread(lambda: setup.run(update))
    assert all(issued.acquire(timeout=3600) for _ in range(2))
    update.give_rest({tile: setup.work[tile] for tile in (1, 0)}, NOW)
    join()
    assert str(setup.executor.last_plan) == "3CPU 3WTS 2CPU 2WTS | 1CPU 1WTS 0CPU 0WTS"


def test_tiles_that_are_ahead_wait_for_no_slot_and_for_no_tile_of_the_cpu():
    schedule = make_schedule("stride", 2, numels=[64] * 8)
    asked = []

    def has_room(wait):
        asked.append(wait)
        return wait

    arrivals = AllAtOnce(range(8), chain_of=lambda tile: AHEAD_CHAIN if tile in (5, 7) else ())
    actions = [str(action) for action in schedule.actions(arrivals, None, has_room)]
    assert actions[:6] == ["5H2D", "5GPU", "5D2H", "7H2D", "7GPU", "7D2H"]
    assert len(asked) == 6, "of the others, and not of these"


def test_an_update_whose_last_tiles_could_not_be_handed_over_fails():
    update, _ = made()
    with mock.patch.object(update, "give", side_effect=MemoryError), pytest.raises(MemoryError):
        update.give_rest({}, NOW)
    with pytest.raises(UpdateError, match="could not be handed over: MemoryError"):
        update.take(wait=True)


def test_an_update_that_is_given_up_while_it_waits_for_tiles_fails_and_one_that_has_all_does_not():
    update, _ = made()
    update.give_up(UpdateError("the engine is destroyed"))
    assert not update.is_open
    with pytest.raises(UpdateError, match="the engine is destroyed"):
        update.take(wait=False)
    update, _ = made(1)
    update.give_rest({0: None}, NOW)
    update.give_up(UpdateError("too late"))
    assert update.take(wait=True) == [0]
    assert update.take(wait=True) == ()
