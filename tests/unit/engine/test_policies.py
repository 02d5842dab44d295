"""What the run-time split decides, given what it has learned and sees."""

import pytest

from deep_optimizer_states.core.plan import DEVICE_CHAIN, HOST_CHAIN
from deep_optimizer_states.core.policies import (
    ITERATIONS_A_TURN,
    LONGEST_WAIT,
    Flight,
    HostStep,
    RunTimeSplit,
)


class Lanes:
    """The CPU takes a second an element; the device ends ``pace`` of them meanwhile.

    Args:
        pace: That number.
        stall: Seconds for which a CPU waits before a tile while the device has one.
    """

    def __init__(self, pace=1.0, stall=0.0):
        self.pace, self.stall = pace, stall
        self.now_s, self.flights = 0.0, []

    def in_flight(self):
        return sum(flight.numel for flight in self.flights if flight.end_s > self.now_s)

    def run(self, split, numels=(1,) * 40):
        """One update; where each tile went, in that order."""
        self.now_s, self.flights, steps, chains = 0.0, [], [], []
        tiles = list(range(100, 100 + len(numels)))
        sizes = dict(zip(tiles, numels, strict=True))
        choose = split.start_split(tiles, sizes, self.in_flight)
        for tile in tiles:
            numel, chain = sizes[tile], choose(tile)
            chains.append((tile - 100, chain))
            if chain == DEVICE_CHAIN:
                begin_s = self.now_s
                free_s = max([begin_s + numel / self.pace, *(f.end_s for f in self.flights)])
                self.flights.append(Flight(numel, begin_s, free_s + numel / self.pace))
                continue
            wait = self.stall if self.in_flight() else 0.0
            steps.append(HostStep(numel, wait, numel))
            self.now_s += wait + numel
        split.learn(steps, self.flights, max([self.now_s, *(f.end_s for f in self.flights)]))
        return chains


def shares(chains):
    return [[tile for tile, got in chains if got == chain] for chain in (DEVICE_CHAIN, HOST_CHAIN)]


def made(pace):
    split = RunTimeSplit()
    split.pace = pace
    return split


def test_tiles_are_handed_out_in_their_order():
    chains = Lanes().run(RunTimeSplit())
    assert [tile for tile, _ in chains] == list(range(40))
    device, host = shares(chains)
    assert abs(len(device) - len(host)) <= 4


@pytest.mark.parametrize("pace", [0.1, 0.5, 2, 8, 25])
@pytest.mark.parametrize("numels", [(1,) * 400, (1, 3) * 100, (1,) * 3])
def test_it_measures_how_fast_the_device_is(pace, numels):
    split, lanes = made(1.0), Lanes(pace)
    lanes.run(split, numels)
    assert split.pace == pytest.approx(pace, rel=0.1)
    device, host = shares(lanes.run(split, numels))
    if len(numels) > 3:
        elements = [sum(numels[tile] for tile in tiles) for tiles in (device, host)]
        assert elements[0] / elements[1] == pytest.approx(pace, rel=0.25)


@pytest.mark.parametrize(
    ("pace", "count", "lane", "has_some"),
    [(9.0, 9, 1, False), (9.0, 14, 1, True), (0.1, 19, 0, False), (0.1, 25, 0, True)],
)
def test_the_last_tiles_go_to_who_ends_them_first(pace, count, lane, has_some):
    """To a device that ends them before the CPU would one, and not to a slow device."""
    assert bool(shares(Lanes(pace).run(made(pace), (1,) * count))[lane]) is has_some


def test_tiny_tiles_are_the_cpus():
    device, host = shares(Lanes(5.0).run(made(5.0), (1,) * 30 + (5000,) * 10))
    assert set(host) >= set(range(30))
    assert device


def test_a_cpu_that_waits_for_its_weights_gets_the_link_for_itself_if_that_is_faster():
    split, lanes = RunTimeSplit(), Lanes(0.3, stall=0.5)
    used = [bool(shares(lanes.run(split))[0]) for _ in range(12)]
    assert used == [True, False, False, True, False, False, True, *[False] * 4, True]
    for _ in range(300):
        used.append(bool(shares(lanes.run(split))[0]))
    assert 1 <= sum(used[-2 * LONGEST_WAIT :]) <= 3, "tried again now and then"
    lanes.stall = 0.0
    for _ in range(LONGEST_WAIT + 1):
        lanes.run(split)
    assert all(shares(lanes.run(split))[0] for _ in range(10)), "and kept once it is faster"


def test_a_device_that_is_worth_the_wait_is_kept():
    split, lanes = RunTimeSplit(), Lanes(5.0, stall=0.5)
    used = [bool(shares(lanes.run(split))[0]) for _ in range(300)]
    assert used.count(False) == 1, "tried once without it"


def test_the_first_waits_may_be_for_the_backward():
    steps = [HostStep(1, 5.0, 1.0)] * 3 + [HostStep(1, 0.0, 1.0)] * 20
    split = RunTimeSplit()
    split.learn(steps, [Flight(10, 0.0, 20.0)], 40.0)
    assert not split.cpu_only
    assert split.pace == pytest.approx(1.0), "nor do they make the CPU slow"
    split.learn([*steps, HostStep(1, 5.0, 1.0)], [Flight(10, 0.0, 20.0)], 40.0)
    assert split.cpu_only


def test_a_wait_between_large_tiles_is_judged_by_the_time_of_the_whole_update():
    steps = [HostStep(100, 0.0, 10.0)] * 4 + [HostStep(1, 3.0, 0.1)] + [HostStep(100, 0, 10.0)] * 6
    split = RunTimeSplit()
    split.learn(steps, [Flight(10, 0.0, 20.0)], 110.0)
    assert not split.cpu_only


@pytest.mark.parametrize(("pace", "lane"), [(1e-6, 0), (1e6, 1)])
def test_a_lane_that_got_nothing_for_long_is_tried_again(pace, lane):
    split, lanes = made(pace), Lanes(1.0)
    used = [bool(shares(lanes.run(split))[lane]) for _ in range(LONGEST_WAIT + 30)]
    assert not any(used[:LONGEST_WAIT])
    assert used[-1]
    assert 0.01 < split.pace < 100


def test_nothing_to_share():
    split = RunTimeSplit()
    for _ in range(LONGEST_WAIT + 2):
        assert Lanes().run(split, ()) == []
    assert split.pace == 1.0


def iterate(split, shared_s, alone_s, count):
    """So many iterations; in which the CPU was alone, and what was said."""
    alone, said = [], []
    for _ in range(count):
        alone.append(split.cpu_only)
        said.append(split.note_iteration(alone_s if split.cpu_only else shared_s))
    return alone, [words for words in said if words]


@pytest.mark.parametrize(
    ("shared_s", "alone_s", "policy"), [(0.9, 0.8, "all-host"), (0.8, 0.9, "dynamic")]
)
def test_auto_ends_at_the_way_of_the_shorter_iterations(shared_s, alone_s, policy):
    split = RunTimeSplit(by_iteration=True)
    alone, said = iterate(split, shared_s, alone_s, 600)
    turn = [False] * ITERATIONS_A_TURN + [True] * ITERATIONS_A_TURN
    assert alone[: len(turn)] == turn
    assert said == [policy]
    slower = alone.count(policy == "dynamic")
    assert 2 * ITERATIONS_A_TURN < slower < 0.06 * len(alone), "tried again, more and more seldom"
    assert iterate(split, alone_s, shared_s, 600)[1] == [
        "dynamic" if policy == "all-host" else "all-host"
    ], "and found out when it changes"


def test_auto_judges_no_update_by_its_own_time_and_dynamic_no_iteration():
    lanes, auto, dynamic = Lanes(0.3, stall=0.5), RunTimeSplit(by_iteration=True), RunTimeSplit()
    lanes.run(auto)
    lanes.run(dynamic)
    assert (auto.cpu_only, dynamic.cpu_only) == (False, True)
    assert iterate(dynamic, 9.0, 1.0, 20) == ([True] * 20, [])
    assert auto.pace == dynamic.pace


def test_one_iteration_that_took_long_changes_nothing():
    """A checkpoint was saved in it, or another process had the cores."""
    split = RunTimeSplit(by_iteration=True)
    iterate(split, 0.8, 0.9, 2 * ITERATIONS_A_TURN)
    assert not split.cpu_only
    assert split.note_iteration(60.0) == ""
    assert iterate(split, 0.8, 0.9, 4 * ITERATIONS_A_TURN)[1] == []


def test_ways_that_take_about_as_long_do_not_take_turns():
    split = RunTimeSplit(by_iteration=True)
    assert iterate(split, 1.0, 0.98, 300)[1] == ["dynamic"]
    assert iterate(RunTimeSplit(by_iteration=True), 1.0, 0.96, 300)[1] == ["all-host"]
