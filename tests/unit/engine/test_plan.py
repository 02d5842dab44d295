"""Plans and schedules: which lane steps a tile, in which order, in how much memory."""

import dataclasses
from typing import get_args

import pytest

from deep_optimizer_states.config import Policy as PolicyName
from deep_optimizer_states.core.plan import (
    BAR,
    DEVICE_CHAIN,
    Action,
    Kind,
    Plan,
    Tile,
    choose_resident_subgroups,
    cut_into_tiles,
    subgroup_offsets,
)
from deep_optimizer_states.core.policies import POLICIES, takes
from deep_optimizer_states.core.schedule import AllAtOnce, Schedule
from deep_optimizer_states.errors import PlanError


def read_plan(text):
    """The plan of a text form."""
    words = text.split()
    before_norm = words.index(BAR) if BAR in words else 0
    actions = [Action(int(word[:-3]), Kind(word[-3:])) for word in words if word != BAR]
    return Plan(max(action.tile for action in actions) + 1, tuple(actions), before_norm)


@pytest.mark.parametrize(
    ("policy", "stride", "count", "found"),
    [
        ("stride", 2, 7, {1, 3, 5}),  # the paper's rule
        ("stride", 3, 7, {2, 5}),
        ("stride", 1, 3, {0, 1, 2}),
        ("stride", 9, 3, set()),
        ("all-host", 2, 3, set()),
        ("ratio", 2, 3, set()),
        ("dynamic", 2, 3, set()),
        ("auto", 2, 3, set()),
        ("all-device", 2, 3, {0, 1, 2}),
    ],
)
def test_a_policy_takes_subgroups_to_the_device(policy, stride, count, found):
    assert {idx for idx in range(count) if takes(policy, stride)(idx)} == found


def test_a_config_takes_every_policy():
    assert set(POLICIES) == set(get_args(PolicyName))


def make(  # noqa: PLR0913 - each row gives some of them
    numels, policy, stride=2, ratio=1.0, tile_numel=16, separate=(), on_host=False
):
    schedule = Schedule.make(numels, policy, stride, ratio, tile_numel, separate)
    return dataclasses.replace(schedule, weights_on_host=on_host)


def plan_of(schedule, order=None, has_room=lambda wait: True):
    arrivals = AllAtOnce(range(len(schedule.tiles)) if order is None else order)
    actions = schedule.actions(arrivals, lambda *_: lambda tile: DEVICE_CHAIN, has_room)
    return Plan(len(schedule.tiles), tuple(actions))


@pytest.mark.parametrize(
    ("given", "text", "resident", "device", "host"),
    [
        (
            {"numels": [16] * 4, "policy": "stride"},
            "1H2D 1GPU 1D2H 3H2D 3GPU 3D2H 0CPU 0WTS 2CPU 2WTS",
            *((), (1, 3), (0, 2)),
        ),
        (
            {"numels": [16] * 3, "policy": "stride", "ratio": 1 / 3},
            "0GPU 1GPU 2CPU 2WTS",
            *((0, 1), (), (2,)),
        ),
        # Weights in host memory are sent nowhere by the CPU, and back by the device.
        (
            {"numels": [16] * 5, "policy": "stride", "ratio": 4 / 5, "on_host": True},
            "0GPU 0D2H 1H2D 1GPU 1D2H 3H2D 3GPU 3D2H 2CPU 4CPU",
            *((0,), (1, 3), (2, 4)),
        ),
    ],
)
def test_the_text_form_of_a_plan(given, text, resident, device, host):
    plan = plan_of(make(**given))
    assert str(plan) == text
    assert (plan.resident_tiles, plan.device_tiles, plan.host_tiles) == (resident, device, host)
    assert read_plan(text) == plan


@pytest.mark.parametrize(
    "text",
    [
        "0AHD | 0H2D 0GPU 0D2H",
        "1AHD 2CPU 2WTS 1H2D | 1GPU 1D2H 0CPU 0WTS",
        "0CPU 0WTS |",
        "1AHD | 1H2D 1GPU 1D2H 0CPU",
        "1AHD | 1H2D 1GPU 0CPU 0WTS",
    ],
)
def test_what_runs_before_the_norm_stands_before_a_bar(text):
    plan = read_plan(text)
    assert str(plan) == text
    assert plan.before_norm == text.split().index("|")
    assert set(plan.device_tiles) == {a.tile for a in plan.actions if a.kind is Kind.AHEAD}


BOTH_MEMORIES = "where 16-bit weights live in host memory"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("0H2D 0D2H", "every tile needs"),
        ("0AHD 0H2D 0GPU", "0AHD: it runs before the norm is known; put it before the |"),
        ("0AHD 0H2D 0GPU 0D2H", "0AHD: it runs before the norm is known; put it before the |"),
        ("1CPU 1WTS | 0AHD 0H2D 0GPU 0D2H", "put it before the |"),
        ("0AHD | 0CPU 0WTS", "tile 0 gets '0AHD 0CPU 0WTS'"),
        ("0AHD | 0GPU 0D2H", "every tile needs"),
        ("0CPU 0WTS 0CPU 0WTS", "once"),
        ("0WTS 0CPU", "in that order"),
        ("0H2D 0D2H 0GPU", "in that order"),
        ("1CPU 1WTS", "tile 0 gets 'nothing'"),
        *((text, BOTH_MEMORIES) for text in ("0CPU 1CPU 1WTS", "0GPU 0D2H 1GPU")),
        *((text, BOTH_MEMORIES) for text in ("0GPU 1CPU", "0CPU 0D2H", "0H2D 0GPU 1CPU")),
    ],
)
def test_broken_plans_are_refused(text, complaint):
    with pytest.raises(PlanError, match=complaint):
        read_plan(text)


@pytest.mark.parametrize(
    ("action", "words"),
    [
        (lambda: Plan(2, (Action(5, Kind.PREFETCH),)), "5H2D"),
        (lambda: takes("stride", 0), "0"),
        (lambda: takes("every-other", 2), "every-other"),
        *((lambda n=n: cut_into_tiles([40], n), f"tile_numel {n}") for n in (0, 8, 24, -16)),
        *((lambda r=r: choose_resident_subgroups([1], r), f"ratio {r}") for r in (1.5, -0.5)),
    ],
)
def test_wrong_numbers_are_named(action, words):
    with pytest.raises(PlanError, match=words):
        action()


def test_tiles_cut_uneven_subgroups():
    assert cut_into_tiles([40, 0, 16], 32) == (Tile(0, 0, 32), Tile(0, 32, 8), Tile(2, 0, 16))
    assert subgroup_offsets([3, 0, 5]) == [0, 3, 3]


def test_tiles_of_a_run_are_those_that_hold_any_of_it():
    schedule = make([64, 0, 64], "all-host")
    assert list(schedule.tiles_of(Tile(0, 15, 1))) == [0]
    assert list(schedule.tiles_of(Tile(0, 15, 2))) == [0, 1]
    assert list(schedule.tiles_of(Tile(2, 16, 48))) == [5, 6, 7]
    assert list(schedule.tiles_of(Tile(2, 16, 0))) == []


class Device:
    """Takes ``most`` tiles; one is through whenever somebody waits for room."""

    def __init__(self, most):
        self.free, self.waits = most, 0

    def has_room(self, wait):
        if not self.free and wait:
            self.free, self.waits = 1, self.waits + 1
        if not self.free:
            return False
        self.free -= 1
        return True


@pytest.mark.parametrize(
    ("most", "text", "waits"),
    [
        (3, "1H2D 1GPU 1D2H 3H2D 3GPU 3D2H 0CPU 0WTS 2CPU 2WTS", 0),
        (1, "1H2D 1GPU 1D2H 0CPU 0WTS 2CPU 2WTS 3H2D 3GPU 3D2H", 1),
        (0, "0CPU 0WTS 2CPU 2WTS 1H2D 1GPU 1D2H 3H2D 3GPU 3D2H", 2),
    ],
)
def test_the_device_is_given_no_more_tiles_than_it_has_room_for(most, text, waits):
    device = Device(most)
    assert str(plan_of(make([16] * 4, "stride"), has_room=device.has_room)) == text
    assert device.waits == waits


def test_tiles_that_are_tiny_beside_the_largest_stay_on_the_cpu():
    """Persistent parameters: norms and biases, thousands of launches for nothing."""
    separate = [Tile(0, 16, 16), Tile(0, 2**16, 16)]
    schedule = make([2**18], "all-device", tile_numel=2**17, separate=separate)
    tiny = [idx for idx, tile in enumerate(schedule.tiles) if tile.numel == 16]
    plan = plan_of(schedule)
    assert plan.host_tiles == tuple(tiny)
    assert len(tiny) == 3
    assert set(plan.device_tiles) == set(range(len(schedule.tiles))) - set(tiny)


@pytest.mark.parametrize("policy", ["all-host", "all-device", "dynamic"])
def test_tiles_that_are_needed_first_are_updated_first(policy):
    schedule = make([64, 64], policy, tile_numel=32)
    order = schedule.order_of_use([Tile(1, 40, 4), Tile(0, 0, 4), Tile(1, 33, 1)])
    assert order == (3, 0, 1, 2)
    plan = plan_of(schedule, order)
    assert plan.host_tiles + plan.device_tiles == order


@pytest.mark.parametrize(
    ("ratio", "resident"),
    [(1.0, set()), (0.9, {0}), (0.61, {0}), (0.6, {0, 1}), (0.0, {0, 1, 2, 3})],
)
def test_a_resident_share_is_counted_in_elements(ratio, resident):
    assert choose_resident_subgroups([100, 300, 100, 500], ratio) == resident


@pytest.mark.parametrize(
    ("given", "device_tiles", "slot", "staging", "outbox"),
    [
        ({"policy": "stride", "stride": 3}, [3, 4], 48, 48, 0),
        ({"policy": "all-host"}, [], 0, 48, 0),
        ({"policy": "all-device", "ratio": 0.5}, [3, 4, 5], 48, 48, 0),
        ({"policy": "all-device", "ratio": 0.0}, [], 0, 0, 0),
        ({"policy": "dynamic", "ratio": 0.0}, [], 0, 0, 0),
        ({"policy": "stride", "ratio": 0.6}, [2, 5], 32, 48, 0),
        # Outboxes for resident tiles, and no staging.
        ({"policy": "stride", "ratio": 0.6, "on_host": True}, [2, 5], 32, 0, 48),
        ({"policy": "all-host", "on_host": True}, [], 0, 0, 0),
    ],
)
def test_buffers_are_sized_by_what_uses_them(given, device_tiles, slot, staging, outbox):
    made = make([64, 32, 80, 16], tile_numel=48, **given)
    assert sorted(made.device_tiles) == device_tiles
    assert (made.slot_numel, made.staging_numel, made.outbox_numel) == (slot, staging, outbox)
