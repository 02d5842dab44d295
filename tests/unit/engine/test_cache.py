"""Tiles that stay on the device: how many, which, and that each move leaves the newest state."""

import contextlib
import random
from dataclasses import replace
from unittest import mock

import pytest
import torch
from engine_updates import (
    ADAM,
    NUMELS,
    SCHEDULES,
    Setup,
    make_cache,
    make_schedule,
    make_subgroups,
    run_once,
    train,
)
from limited_device import LimitedDevice, Memory

from deep_optimizer_states.core import cache as core_cache
from deep_optimizer_states.core.cache import FIRST_WINDOWS, LATEST_WINDOWS, Budget, Content
from deep_optimizer_states.core.plan import Tile
from deep_optimizer_states.core.policies import LONGEST_WAIT

TILE = 10


class Shown:
    """A device that shows ``free`` bytes, of which others use ``now`` and at most ``peak``."""

    tells_memory = True

    def __init__(self, free=10**9, now=0, peak=0):
        self.free, self.now, self.peak = free, now, peak

    def free_bytes(self):
        return self.free

    def peak_bytes(self):
        return self.now, self.peak


@pytest.fixture(autouse=True)
def every_look_counts(monkeypatch):
    monkeypatch.setattr(core_cache, "LOOK_S", 0.0)


def budget_of(shown, limit="auto", windows=FIRST_WINDOWS):
    budget = Budget(shown, limit, TILE)
    for _ in range(windows):
        budget.look(0)
        budget.next_window(0)
    return budget


def test_a_number_of_bytes_is_kept_to_whatever_is_free():
    budget = Budget(Shown(free=-5), 25, TILE)
    assert budget.room(staying=5, leaving=0) == 20
    assert budget.may_take(15, 10)
    assert not budget.may_take(16, 10)
    assert not budget.look(0), "who gives a number has weighed it"


@pytest.mark.parametrize(("limit", "tells"), [(0, True), ("auto", False)])
def test_nothing_is_taken_where_nothing_may_or_nobody_knows_what_is_free(limit, tells):
    shown = Shown()
    shown.tells_memory = tells
    budget = Budget(shown, limit, TILE)
    budget.next_window(0)
    budget.next_window(0)
    assert not budget.is_on
    assert not budget.may_take(0, 1)
    assert budget.room(0, 0) < 0


def test_auto_begins_with_one_tile_after_some_windows_and_doubles():
    budget, taken, rooms = Budget(Shown(), "auto", TILE), 0, []
    for _ in range(FIRST_WINDOWS + 3):
        budget.look(taken)
        rooms.append(budget.room(taken, 0))
        taken += int(max(0.0, rooms[-1]))
        budget.next_window(taken)
    assert rooms[:FIRST_WINDOWS] == [float("-inf"), 0]
    assert rooms[FIRST_WINDOWS:] == [TILE, TILE, 2 * TILE]


def test_a_gpu_is_not_asked_about_its_memory_for_every_parameter(monkeypatch):
    monkeypatch.setattr(core_cache, "LOOK_S", 1000.0)
    shown = Shown(free=-1)
    budget = Budget(shown, "auto", TILE)
    assert [budget.look(0) for _ in range(3)] == [True, False, False]


def test_what_others_needed_lately_is_left_to_them():
    shown = Shown(free=100, now=50, peak=70)
    budget = budget_of(shown, windows=FIRST_WINDOWS)
    budget._limit = 10**6
    # Between two looks 20 were taken and given back.
    assert budget.room(0, 0) == 80
    shown.now = 20  # their activations are gone
    assert budget.room(0, 0) == 50
    shown.free, shown.now = 70, 50  # 30 of them are ours
    assert budget.room(0, 30) == 50, "what leaves may stay instead"
    shown.free, shown.now = 100, 20
    for _ in range(LATEST_WINDOWS):
        budget.look(0)
        budget.next_window(10**6)
    budget._limit = 10**6
    assert budget.room(0, 0) == 80, "the long batch was too long ago"


def test_memory_that_activations_leave_is_taken_for_a_while_but_for_what_a_layer_takes():
    shown = Shown(free=100, now=60, peak=90)
    budget = budget_of(shown)
    budget._limit = 10**6
    assert budget.may_take(0, 70)
    assert not budget.may_take(0, 71)


def test_after_a_shortage_auto_keeps_half_and_waits_longer_each_time():
    budget, waits = budget_of(Shown()), []
    for _ in range(9):
        assert budget.was_short(800) == 400
        waits.append(next(n for n in range(99) if not budget.is_paused or skip(budget)))
    assert waits == [1, 2, 4, 8, 16, 32, LONGEST_WAIT, LONGEST_WAIT, LONGEST_WAIT]
    budget.next_window(400)
    assert budget._limit == 440, "and then a tenth at a time"


def skip(budget):
    budget.next_window(400)
    return False


# A cache that has tiles.


def free(total):
    return LimitedDevice(ADAM, memory=Memory(total))


def grown(device, limit=10**9, policy="all-host", order=None):
    subgroups = make_subgroups()
    for subgroup in subgroups:
        subgroup.grad.fill_(1)
    setup = Setup(make_schedule(policy, tile_numel=512), device, subgroups)
    setup.cache = make_cache(setup.schedule, device, subgroups, limit)
    setup.executor._cache = setup.cache
    setup.cache.grow(range(len(setup.schedule.tiles)) if order is None else order)
    return setup


def step(setup):
    setup.work = [replace(it, place=setup.cache.claim(n)) for n, it in enumerate(setup.work)]
    run_once(setup.executor, setup.schedule, setup.work)


def test_those_stay_that_are_needed_first_and_those_leave_that_are_needed_last(device):
    order = [4, 3, 0, 1, 2]
    setup = grown(device, limit=14 * (512 + 512 + 64), order=order)
    assert list(setup.cache.tiles) == order[:2], setup.schedule.tiles
    step(setup)
    setup.cache.give_back(14 * 600)
    assert list(setup.cache.tiles) == order[:1]


@pytest.mark.parametrize("policy", ["all-host", "dynamic", "stride", "all-device"])
def test_a_policy_that_gives_tiles_to_the_device_has_chosen_them(device, policy):
    setup = grown(device, policy=policy)
    least = max(NUMELS) // 1024
    movable = {n for n, tile in enumerate(setup.schedule.tiles) if tile.numel >= least}
    assert set(setup.cache.tiles) == (setup.schedule.device_tiles or movable)


def test_looking_keeps_tiles_and_writing_drops_them_and_homes_have_the_newest(device):
    setup = grown(device)
    before = [tile.tensors.master.clone() for tile in setup.work]
    step(setup)
    assert all(map(torch.equal, before, [it.tensors.master for it in setup.work])), "not home yet"
    assert {setup.cache.place(n).content for n in setup.cache.tiles} == {Content.DIRTY}
    overwritten = []
    setup.cache.before_overwrite = overwritten.append
    setup.cache.flush()
    assert overwritten == list(setup.cache.tiles)
    assert {setup.cache.place(n).content for n in setup.cache.tiles} == {Content.CLEAN}
    after = [it.tensors.master.clone() for it in setup.work]
    assert not any(map(torch.equal, before, after))
    setup.cache.flush()
    assert len(overwritten) == len(setup.work), "a clean tile is flushed no more"
    setup.cache.release()
    assert not list(setup.cache.tiles)
    assert all(map(torch.equal, after, [it.tensors.master for it in setup.work]))


def test_what_an_update_has_is_neither_flushed_nor_dropped(device):
    setup = grown(device)
    claimed = setup.cache.claim(0)
    setup.cache.release()
    assert list(setup.cache.tiles) == [0]
    assert claimed.tensors


def test_giving_back_takes_no_memory(device):
    setup = grown(device)
    step(setup)
    with (
        mock.patch.object(device, "empty_device", side_effect=AssertionError),
        mock.patch.object(device, "empty_host", side_effect=AssertionError),
    ):
        setup.cache.release()


def test_an_allocation_of_our_own_that_fails_gives_half_back():
    device = free(14 * 2600)
    setup = grown(device)
    few = len(setup.cache.tiles)
    assert 0 < few < len(setup.schedule.tiles)
    setup.cache.grow(range(len(setup.schedule.tiles)))
    assert len(setup.cache.tiles) <= few, "it waits"
    device.close()


def test_all_is_given_back_when_somebody_elses_allocation_fails(device):
    setup = grown(device)
    step(setup)
    taken = setup.cache.taken_bytes
    assert taken == 14 * sum(tile.numel for tile in setup.schedule.tiles)
    assert setup.cache.run_out() == taken
    assert setup.cache.taken_bytes == 0


def test_gradients_are_written_where_they_are_kept_until_they_are_brought_home(device):
    setup = grown(device, order=[0, 2])
    (run, *_), subgroup = setup.schedule.tiles, setup.subgroups[0]
    whole = Tile(0, 8, subgroup.numel - 16)
    assert len(setup.cache.grads_of(whole, subgroup.grad)) == 1
    step(setup)
    pieces = setup.cache.grads_of(whole, subgroup.grad)
    assert sum(piece.numel() for piece in pieces) == whole.numel
    value = torch.arange(whole.numel).to(subgroup.grad.dtype) % 100
    core_cache.copy_all(pieces, value.split([piece.numel() for piece in pieces]))
    at_home = subgroup.grad[8 : run.numel]
    assert (at_home == 1).all(), "it is kept on the device"
    setup.cache.bring_grads_home([2])
    assert (at_home == 1).all()
    setup.cache.bring_grads_home([0])
    assert torch.equal(subgroup.grad[8:-8], value), "the other tile's was at home"
    assert list(setup.cache.tiles) == [0, 2], "the state stays"
    (home,) = setup.cache.grads_of(whole, subgroup.grad)
    assert home.data_ptr() == subgroup.grad[8:].data_ptr()


def test_a_failed_update_loses_no_gradient(device):
    """Its state is loaded anew, and gradients of parameters that take no part are read again."""
    setup = grown(device)
    step(setup)
    for number in setup.cache.tiles:
        setup.cache.place(number).grad.fill_(3)
    setup.executor.reset()
    assert not list(setup.cache.tiles)
    assert all((subgroup.grad == 3).all() for subgroup in setup.subgroups)


# Memory that others take and give back.


class Hog:
    """Takes and frees memory of the device at random, as activations or other processes do."""

    def __init__(self, memory, seed):
        self.memory, self.chance, self.held = memory, random.Random(seed), 0
        self.num_failed = 0

    def change(self, cache):
        wanted = int(self.memory.total_bytes * self.chance.uniform(0, 0.9))
        with contextlib.suppress(torch.OutOfMemoryError):
            try:
                self._take(wanted)
            except torch.OutOfMemoryError:
                self.num_failed += 1
                cache.run_out()
                self._take(wanted)  # the next attempt has it

    def _take(self, wanted):
        more, self.held = wanted - self.held, wanted
        try:
            self.memory.take_others(more)
        except torch.OutOfMemoryError:
            self.held -= more
            raise


def run_beside_a_hog(name, seed, steps=6):
    schedule = SCHEDULES[name]
    slots = 3 * 14 * schedule.slot_numel + 2 * schedule.outbox_numel * 2
    resident = 0
    memory = Memory(slots + resident + 14 * sum(NUMELS))
    hog, shares = Hog(memory, seed), []

    def make(adam, faults):
        return LimitedDevice(adam, faults, memory)

    def move(cache, step):
        cache.look()
        hog.change(cache)
        if cache.look():
            cache.relieve()
        shares.append(len(cache.tiles))
        cache.begin_window()

    with (
        mock.patch("engine_updates.EmulatedDevice", make),
        mock.patch("engine_updates.ROOMY", "auto"),
        mock.patch.object(make_cache, "__defaults__", ((), "auto")),
    ):
        result, _ = train(schedule, steps=steps, stays=1000, ahead=seed % 5, move=move)
    return result, shares


SEEDS = [3, pytest.param(200, marks=pytest.mark.exhaustive)]


@pytest.mark.parametrize("seeds", SEEDS)
def test_random_pressure_changes_no_bit(seeds):
    """200 random runs in `make test-all`."""
    names = [
        "all-host, tiles",
        "stride 2, tiles",
        "dynamic, tiles",
        "stride 1, weights on the host",
    ]
    reference, moved = train(make_schedule(), steps=6)[0], 0
    for seed in range(seeds):
        result, shares = run_beside_a_hog(names[seed % len(names)], seed)
        assert torch.equal(result, reference), (seed, shares)
        moved += len(set(shares)) > 2
    assert moved > seeds // 2, "the share has hardly changed"
