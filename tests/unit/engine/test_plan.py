import dataclasses
from typing import get_args

import pytest

from deep_optimizer_states.config import Policy as PolicyName
from deep_optimizer_states.core.plan import (
    DEVICE_CHAIN,
    Action,
    Kind,
    Plan,
    Tile,
    choose_resident_subgroups,
    cut_into_tiles,
    subgroup_offsets,
)
from deep_optimizer_states.core.policies import POLICIES, policy_of
from deep_optimizer_states.core.schedule import AllAtOnce, Schedule
from deep_optimizer_states.errors import PlanError


def taken(policy, stride, count):
    return {idx for idx in range(count) if policy_of(policy, stride).takes(idx)}


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
        ("all-device", 2, 3, {0, 1, 2}),
    ],
)
def test_a_policy_takes_subgroups_to_the_device(policy, stride, count, found):
    assert taken(policy, stride, count) == found


@pytest.mark.parametrize(("policy", "stride"), [("stride", 0), ("every-other", 2)])
def test_wrong_policy_is_named(policy, stride):
    with pytest.raises(PlanError, match=str(stride) if policy == "stride" else policy):
        policy_of(policy, stride)


def test_a_config_takes_every_policy_and_auto():
    assert {*POLICIES, "auto"} == set(get_args(PolicyName))


def always(wait):
    return True


def plan_of(schedule, order=None, has_room=always):
    arrivals = AllAtOnce(range(len(schedule.tiles)) if order is None else order)
    actions = schedule.actions(arrivals, all_to_the_device, has_room)
    return Plan(len(schedule.tiles), tuple(actions))


def all_to_the_device(tiles, numels):
    return lambda tile: DEVICE_CHAIN


def test_text_form_of_a_stride_2_plan():
    plan = plan_of(Schedule.make([16] * 4, "stride", 2, 1.0, 16))
    assert str(plan) == "1H2D 1GPU 1D2H 3H2D 3GPU 3D2H 0CPU 0WTS 2CPU 2WTS"
    assert Plan.parse(str(plan)) == plan


@pytest.mark.parametrize(
    "text",
    [
        "0AHD | 0H2D 0GPU 0D2H",
        "1AHD 2CPU 2WTS 1H2D | 1GPU 1D2H 0CPU 0WTS",
        "0CPU 0WTS |",
        "1AHD | 1H2D 1GPU 1D2H 0CPU",
    ],
)
def test_what_runs_before_the_norm_stands_before_a_bar(text):
    plan = Plan.parse(text)
    assert str(plan) == text
    assert plan.before_norm == text.split().index("|")
    assert set(plan.device_tiles) == {a.tile for a in plan.actions if a.kind is Kind.AHEAD}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("0H2D 0GPU", "every tile needs"),
        ("0AHD 0H2D 0GPU 0D2H", "0AHD: it runs before the norm is known; put it before the |"),
        ("1CPU 1WTS | 0AHD 0H2D 0GPU 0D2H", "put it before the |"),
        ("0AHD | 0CPU 0WTS", "tile 0 gets '0AHD 0CPU 0WTS'"),
        ("0AHD | 0GPU 0D2H", "every tile needs"),
        ("0CPU | 0WTS | 1CPU 1WTS", "'|': an action is"),
        ("0CPU 0WTS 0CPU 0WTS", "once"),
        ("0WTS 0CPU", "in that order"),
        ("0H2D 0D2H 0GPU", "in that order"),
        ("1CPU 1WTS", "tile 0 gets 'nothing'"),
        ("0FLY", "0CPU"),
        ("0CPU WTS", "'WTS'"),
        ("0CPU0WTS", "'0CPU0WTS'"),
    ],
)
def test_broken_plans_are_refused(text, complaint):
    with pytest.raises(PlanError, match=complaint):
        Plan.parse(text)


def test_resident_tiles_are_stepped_where_they_are():
    plan = plan_of(Schedule.make([16] * 3, "stride", 2, 1 / 3, 16))
    assert str(plan) == "0GPU 1GPU 2CPU 2WTS"
    assert (plan.resident_tiles, plan.device_tiles, plan.host_tiles) == ((0, 1), (), (2,))


def on_host(schedule):
    """The same with 16-bit weights in host memory."""
    return dataclasses.replace(schedule, weights_on_host=True)


def test_weights_in_host_memory_are_sent_nowhere_by_the_cpu_and_back_by_the_device():
    plan = plan_of(on_host(Schedule.make([16] * 5, "stride", 2, 4 / 5, 16)))
    assert str(plan) == "0GPU 0D2H 1H2D 1GPU 1D2H 3H2D 3GPU 3D2H 2CPU 4CPU"
    assert (plan.resident_tiles, plan.device_tiles, plan.host_tiles) == ((0,), (1, 3), (2, 4))
    assert Plan.parse(str(plan)) == plan


@pytest.mark.parametrize("text", ["0CPU 1CPU 1WTS", "0GPU 0D2H 1GPU", "0GPU 1CPU", "0CPU 0D2H"])
def test_a_plan_whose_weights_live_in_both_memories_is_refused(text):
    with pytest.raises(PlanError, match="where 16-bit weights live in host memory"):
        Plan.parse(text)


def test_tiles_cut_uneven_subgroups():
    assert cut_into_tiles([40, 0, 16], 32) == (Tile(0, 0, 32), Tile(0, 32, 8), Tile(2, 0, 16))


def test_runs_apart_get_tiles_of_their_own():
    apart = [Tile(0, 40, 8), Tile(0, 48, 4), Tile(1, 90, 10)]
    tiles = cut_into_tiles([100, 100], 48, apart)
    assert [tile for tile in tiles if tile.subgroup == 0] == [
        Tile(0, 0, 32), Tile(0, 32, 16), Tile(0, 48, 16), Tile(0, 64, 36)
    ]  # fmt: skip
    assert [tile for tile in tiles if tile.subgroup == 1] == [
        Tile(1, 0, 48), Tile(1, 48, 32), Tile(1, 80, 20)
    ]  # fmt: skip


def test_tiles_of_a_run_are_those_that_hold_any_of_it():
    schedule = Schedule.make([64, 0, 64], "all-host", 1, 1.0, 16)
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
        self.free -= 1
        return self.free >= 0 or bool(setattr(self, "free", 0))


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
    schedule = Schedule.make([16] * 4, "stride", 2, 1.0, 16)
    assert str(plan_of(schedule, has_room=device.has_room)) == text
    assert device.waits == waits


def test_tiles_that_are_tiny_beside_the_largest_stay_on_the_cpu():
    """Persistent parameters: norms and biases, thousands of launches for nothing."""
    apart = [Tile(0, 16, 16), Tile(0, 2**16, 16)]
    schedule = Schedule.make([2**18], "all-device", 1, 1.0, 2**17, apart)
    tiny = [idx for idx, tile in enumerate(schedule.tiles) if tile.numel == 16]
    plan = plan_of(schedule)
    assert plan.host_tiles == tuple(tiny)
    assert len(tiny) == 3
    assert set(plan.device_tiles) == set(range(len(schedule.tiles))) - set(tiny)


@pytest.mark.parametrize("policy", ["all-host", "all-device", "dynamic"])
def test_tiles_that_are_needed_first_are_updated_first(policy):
    schedule = Schedule.make([64, 64], policy, 1, 1.0, 32)
    order = schedule.order_of_use([Tile(1, 40, 4), Tile(0, 0, 4), Tile(1, 33, 1)])
    assert order == (3, 0, 1, 2)
    plan = plan_of(schedule, order)
    assert plan.host_tiles + plan.device_tiles == order


@pytest.mark.parametrize("tile_numel", [0, 8, 24, -16])
def test_tile_size_must_be_a_multiple_of_a_vector(tile_numel):
    with pytest.raises(PlanError, match=f"tile_numel {tile_numel}"):
        cut_into_tiles([40], tile_numel)


def test_resident_share_is_counted_in_elements():
    numels = [100, 300, 100, 500]
    assert choose_resident_subgroups(numels, 1.0) == frozenset()
    assert choose_resident_subgroups(numels, 0.9) == {0}
    assert choose_resident_subgroups(numels, 0.61) == {0}
    assert choose_resident_subgroups(numels, 0.6) == {0, 1}
    assert choose_resident_subgroups(numels, 0.0) == {0, 1, 2, 3}
    assert choose_resident_subgroups([1, 2], 1.0) == frozenset()
    for ratio in (1.5, -0.5):
        with pytest.raises(PlanError, match=f"ratio {ratio}"):
            choose_resident_subgroups(numels, ratio)


def test_a_schedule_sends_the_policys_subgroups_and_sizes_buffers_by_what_uses_them():
    def make(policy, ratio=1.0):
        made = Schedule.make([64, 32, 80, 16], policy, 3, ratio, 48)
        return sorted(made.device_tiles), made.slot_numel, made.staging_numel

    assert make("stride") == ([3, 4], 48, 48)
    assert make("all-host") == ([], 0, 48)
    assert make("all-device", ratio=0.5) == ([3, 4, 5], 48, 48)
    assert make("all-device", ratio=0.0) == ([], 0, 0)
    assert make("dynamic", ratio=0.0) == ([], 0, 0)


def test_weights_in_host_memory_need_outboxes_for_resident_tiles_and_no_staging():
    schedule = Schedule.make([64, 32, 80, 16], "stride", 2, 0.6, 48)
    assert (schedule.slot_numel, schedule.staging_numel, schedule.outbox_numel) == (32, 48, 0)
    schedule = on_host(schedule)
    assert (schedule.slot_numel, schedule.staging_numel, schedule.outbox_numel) == (32, 0, 48)
    assert on_host(Schedule.make([64], "all-host", 2, 1.0, 48)).outbox_numel == 0


def test_an_action_on_a_tile_that_is_not_there_is_refused():
    with pytest.raises(PlanError, match="5H2D"):
        Plan(2, (Action(5, Kind.PREFETCH),))


def test_offsets_are_running_sums():
    assert subgroup_offsets([3, 0, 5]) == [0, 3, 3]
