"""Tiles that an update gets before ``step()``, and those that it gets from it."""

import threading
from unittest import mock

import pytest
from engine_updates import Setup, make_schedule, make_subgroups, start_thread

from deep_optimizer_states.core.device.base import Reached
from deep_optimizer_states.core.plan import AHEAD_CHAIN
from deep_optimizer_states.core.schedule import AllAtOnce
from deep_optimizer_states.core.update_worker import TileQueue
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
    return TileQueue(range(num_tiles), lambda tile: (), followed.append, **options), followed


def test_a_tile_comes_once_and_the_rest_with_the_end():
    tile_queue, followed = made()
    tile_queue.give([4, 5], NOW)
    assert tile_queue.take(wait=True) == [4, 5]
    assert tile_queue.take(wait=False) == []
    assert tile_queue.is_open
    tile_queue.give([2], NOW)
    end = (Reached(), Reached())
    # A tile that was given before stays: its gradient may be on the device alone.
    tile_queue.give_rest(end, host_tiles={0, 4})
    assert not tile_queue.is_open
    assert tile_queue.host_tiles == {0}
    assert tile_queue.take(wait=False) == [2, 0, 1, 3]
    assert tile_queue.take(wait=True) == ()
    assert followed == [NOW, NOW, end]


def test_tiles_whose_gradients_are_on_their_way_are_waited_for_only_where_nothing_else_is_left():
    tile_queue, followed = made()
    late = Later()
    tile_queue.give([5], NOW)
    tile_queue.give([4], (Reached(), late))
    assert tile_queue.take(wait=True) == [5]
    assert tile_queue.take(wait=False) == []
    assert followed == [NOW]
    assert tile_queue.take(wait=True) == [4], "the wait itself is the business of `follow`"
    late.is_set = True
    tile_queue.give([3], (Reached(), late))
    assert tile_queue.take(wait=False) == [3]


def test_what_waits_is_stepped_in_the_order_of_use_and_the_plan_says_what_came_before_the_norm(
    device,
):
    numels = [64] * 4
    setup = Setup(make_schedule(numels=numels), device, make_subgroups(numels))
    executor, issued = setup.executor, threading.Semaphore(0)
    tile_queue = TileQueue([1, 0, 3, 2], setup.cache.chain_of, executor.follow)
    tile_queue.give([2, 3], NOW)
    join = start_thread(lambda: setup.hand_over(tile_queue, lambda tile, event: issued.release()))
    assert all(issued.acquire(timeout=3600) for _ in range(2))
    tile_queue.give_rest(NOW)
    join()
    assert str(executor.last_plan) == "3CPU 3WTS 2CPU 2WTS | 1CPU 1WTS 0CPU 0WTS"


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
    tile_queue, _ = made()
    with mock.patch.object(tile_queue, "give", side_effect=MemoryError), pytest.raises(MemoryError):
        tile_queue.give_rest(NOW)
    with pytest.raises(UpdateError, match="could not be handed over: MemoryError"):
        tile_queue.take(wait=True)
