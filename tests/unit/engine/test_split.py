"""What the run-time split decides, given what it has learned and sees."""

import pytest

from deep_optimizer_states.plan import DEVICE_CHAIN, HOST_CHAIN
from deep_optimizer_states.split import LONGEST_PAUSE, RunTimeSplit


class Lanes:
    """The CPU takes a second a tile of one element; the device ends ``pace`` tiles meanwhile."""

    def __init__(self, pace=1.0, stall=0.0):
        self.pace, self.stall = pace, stall
        self.time_s = self.waited_s = self.given = self.ended = 0.0

    def now_s(self):
        return self.time_s

    def stalled_s(self):
        return self.waited_s

    def in_flight(self):
        return self.given - self.ended

    def run(self, split, num_tiles=40):
        """One update; where each tile went, in that order."""
        chains = []
        tiles = list(range(100, 100 + num_tiles))
        self.given = self.ended = 0
        for tile, chain in split.share(tiles, dict.fromkeys(tiles, 1), self):
            chains.append((tile - 100, chain))
            if chain == DEVICE_CHAIN:
                self.given += 1
                continue
            wait = self.stall if self.in_flight() else 0.0
            self.time_s += 1 + wait
            self.waited_s += wait
            self.ended = min(self.given, self.ended + self.pace * (1 + wait))
        return chains


def shares(chains):
    return [[tile for tile, got in chains if got == chain] for chain in (DEVICE_CHAIN, HOST_CHAIN)]


def test_tiles_are_handed_out_in_their_order():
    chains = Lanes().run(RunTimeSplit())
    assert [tile for tile, _ in chains] == list(range(40))
    device, host = shares(chains)
    assert abs(len(device) - len(host)) <= 4


@pytest.mark.parametrize("pace", [0.1, 0.5, 2, 8, 25])
def test_it_learns_how_fast_the_device_is(pace):
    split, lanes = RunTimeSplit(), Lanes(pace)
    for _ in range(8):
        device, host = shares(lanes.run(split, 400))
    assert split.pace == pytest.approx(pace, rel=0.25)
    assert len(device) / len(host) == pytest.approx(pace, rel=0.25)


def test_the_device_is_given_what_it_ends_during_a_step_of_the_cpu():
    split = RunTimeSplit()
    split.pace = 5.0
    kinds = [chain for _, chain in Lanes(5.0).run(split)]
    assert kinds[:9] == [DEVICE_CHAIN] * 7 + [HOST_CHAIN, DEVICE_CHAIN]


def test_the_last_tiles_are_left_to_a_device_that_ends_them_before_the_cpu_would_one():
    split = RunTimeSplit()
    split.pace = 9.0
    assert shares(Lanes(9.0).run(split, 8))[1] == []
    split.pace = 9.0
    assert shares(Lanes(9.0).run(split, 12))[1] != []


def test_the_last_tiles_are_kept_from_a_slow_device():
    split = RunTimeSplit()
    split.pace = 0.1
    assert shares(Lanes(0.1).run(split, 19))[0] == []
    split.pace = 0.1
    assert shares(Lanes(0.1).run(split, 25))[0] == [0]


def test_a_cpu_that_waits_for_its_weights_gets_the_link_for_itself():
    split, lanes = RunTimeSplit(), Lanes(0.3, stall=0.5)
    used = [bool(shares(lanes.run(split))[0]) for _ in range(12)]
    assert used == [True, False, True, False, False, True, *[False] * 4, True, False]
    for _ in range(300):
        lanes.run(split)
    assert 0 <= split.pause <= LONGEST_PAUSE
    lanes.stall = 0.0
    for _ in range(LONGEST_PAUSE + 1):
        device, _ = shares(lanes.run(split))
    assert device, "and the device is tried again"
    assert shares(lanes.run(split))[0]


def test_a_device_that_was_slow_once_is_tried_again():
    split = RunTimeSplit()
    split.pace = 0.001
    used = [bool(shares(Lanes(1.0).run(split))[0]) for _ in range(60)]
    assert not used[0]
    assert used[-1]
    assert split.pace > 0.5


def test_nothing_to_share():
    assert Lanes().run(RunTimeSplit(), 0) == []
