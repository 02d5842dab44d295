"""What the run-time split decides, given what it has learned and sees."""

import pytest

from deep_optimizer_states.core.plan import DEVICE_CHAIN, HOST_CHAIN
from deep_optimizer_states.core.policies import LONGEST_WAIT, Flight, HostStep, RunTimeSplit


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
