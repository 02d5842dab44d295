"""How much device memory state ahead of an update may take."""

import pytest

from deep_optimizer_states.adapter.zero3 import ahead
from deep_optimizer_states.adapter.zero3.ahead import Room

TILE = 10


class Memory:
    """A device's, of which ``free`` bytes are left."""

    def __init__(self, free, now=0, peak=0):
        self.free, self.now, self.peak = free, now, peak

    def free_bytes(self):
        return self.free

    def peak_bytes(self):
        return self.now, self.peak


def test_a_number_of_bytes_is_kept_to_whatever_is_free():
    room = Room(Memory(free=0), 25, TILE)
    assert room.allows(0, 25)
    assert room.allows(15, 10)
    assert not room.allows(16, 10)
    assert not room.is_short, "who gives a number has weighed it"


@pytest.mark.parametrize(("limit", "looks"), [("auto", 1), (10**6, 3)])
def test_a_gpu_is_not_asked_about_its_memory_for_every_parameter(monkeypatch, limit, looks):
    monkeypatch.setattr(ahead, "LOOK_S", 1000.0)
    room = Room(Memory(free=30), limit, TILE)
    assert [room.may_look() for _ in range(3)].count(True) == looks
    monkeypatch.setattr(ahead, "LOOK_S", 0.0)
    assert room.may_look()


def test_auto_takes_what_is_free_now_and_is_short_when_the_margin_is_touched():
    memory = Memory(free=30)
    room = Room(memory, "auto", TILE)
    assert room.allows(1000, 30)
    assert not room.allows(0, 31)
    memory.free = 0
    assert not room.is_short
    memory.free = -1
    assert room.is_short


def test_auto_leaves_what_a_layer_takes_between_two_looks(monkeypatch):
    memory = Memory(free=100, peak=90)
    room = Room(memory, "auto", TILE)
    monkeypatch.setattr(ahead, "LOOK_S", 0.0)
    for now in (20, 60, 40):
        memory.now = now
        room.look()
    assert room.allows(0, 70)
    assert not room.allows(0, 71), "90 at most, and 60 at a look: 30 come in between"


@pytest.mark.parametrize("limit", ["auto", 10**6])
def test_after_running_out_no_more_is_taken_in_this_window(limit):
    room = Room(Memory(free=10**9), limit, TILE)
    room.was_short(800)
    assert not room.allows(0, 1)
    room.next_window()
    assert room.allows(0, 1)


@pytest.mark.parametrize(
    ("taken", "most"),
    [(800, [400, 440]), (0, [0, TILE])],  # it comes back from nothing
)
def test_after_running_out_auto_takes_half_and_then_a_little_more_each_time(taken, most):
    room = Room(Memory(free=10**9), "auto", TILE)
    room.was_short(taken)
    for limit in most:
        room.next_window()
        assert room.allows(0, limit)
        assert not room.allows(0, limit + 1)
