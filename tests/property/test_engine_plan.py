"""Any plan from any policy updates every element once, in chains that are whole and in order."""

import dataclasses
import functools

from hypothesis import given, strategies as st

from deep_optimizer_states.core.plan import Kind, Plan, Tile
from deep_optimizer_states.core.policies import RunTimeSplit
from deep_optimizer_states.core.schedule import AllAtOnce, Schedule

numels = st.lists(st.integers(0, 500), max_size=12)
policies = st.sampled_from(["all-host", "ratio", "stride", "all-device", "dynamic"])


@st.composite
def runs_of_elements(draw, counts):
    """Runs inside subgroups, such as persistent parameters; they may touch, not overlap."""
    runs = []
    for subgroup, numel in enumerate(counts):
        cuts = sorted(draw(st.sets(st.integers(0, numel), max_size=6)))
        runs += [
            Tile(subgroup, start, end - start)
            for start, end in zip(cuts[::2], cuts[1::2], strict=False)
        ]
    return draw(st.permutations(runs))


@st.composite
def make_schedules(draw):
    counts = draw(numels)
    apart = draw(runs_of_elements(counts))
    tile_numel = 16 * draw(st.integers(1, 20))
    ratio = draw(st.floats(0, 1))
    way = (draw(policies), draw(st.integers(1, 9)), ratio, tile_numel)
    schedule = Schedule.make(counts, *way, apart)
    return dataclasses.replace(schedule, weights_on_host=draw(st.booleans()))


schedules = make_schedules()


def make_plan(schedule, data, host_subgroups=frozenset()):
    order = data.draw(st.none() | st.permutations(range(len(schedule.tiles))))
    split = RunTimeSplit()
    split.pace, split.is_alone = data.draw(st.floats(0.01, 50)), data.draw(st.booleans())

    def in_flight():
        return data.draw(st.integers(0, 5)) * schedule.slot_numel

    share = functools.partial(split.share, in_flight=in_flight)
    whole = range(len(schedule.tiles)) if order is None else order
    arrivals = AllAtOnce(whole, schedule.tiles_of_subgroups(host_subgroups))
    actions = schedule.actions(arrivals, share, lambda wait: wait or data.draw(st.booleans()))
    return Plan(len(schedule.tiles), tuple(actions))


@given(schedules, st.data())
def test_every_element_is_updated_once(schedule, data):
    plan = make_plan(schedule, data)  # Plan itself refuses a tile stepped twice or never
    covered = {}
    for tile in schedule.tiles:
        covered.setdefault(tile.subgroup, []).extend(range(tile.start, tile.start + tile.numel))
        assert tile.start % 16 == 0
    assert all(elements == list(range(len(elements))) for elements in covered.values())
    stepped = sorted(plan.device_tiles + plan.host_tiles + plan.resident_tiles)
    assert stepped == list(range(len(schedule.tiles)))
    assert set(plan.resident_tiles) == schedule.resident_tiles


@given(numels, policies, st.integers(1, 9), st.floats(0, 1))
def test_tiles_cover_every_subgroup(counts, policy, stride, ratio):
    schedule = Schedule.make(counts, policy, stride, ratio, 64)
    totals = [0] * len(counts)
    for tile in schedule.tiles:
        totals[tile.subgroup] += tile.numel
    assert totals == counts


@given(numels, st.data())
def test_runs_apart_share_no_tile_with_elements_further_off(counts, data):
    apart = data.draw(runs_of_elements(counts))
    schedule = Schedule.make(counts, "all-host", 1, 1.0, 64, apart)
    for run in apart:
        for idx in schedule.tiles_of(run):
            tile = schedule.tiles[idx]
            assert tile.subgroup == run.subgroup
            assert tile.start >= run.start - run.start % 16
            assert tile.start + tile.numel < run.start + run.numel + 16


@given(schedules, st.data())
def test_the_order_of_use_holds_every_tile_once(schedule, data):
    sizes = {}
    for tile in schedule.tiles:
        sizes[tile.subgroup] = tile.start + tile.numel
    counts = [sizes.get(idx, 0) for idx in range(max(sizes, default=-1) + 1)]
    runs = data.draw(runs_of_elements(counts))
    order = schedule.order_of_use(runs)
    assert sorted(order) == list(range(len(schedule.tiles)))
    needed = [tile for run in runs for tile in schedule.tiles_of(run)]
    assert list(order[: len(set(needed))]) == list(dict.fromkeys(needed))


@given(schedules, st.data())
def test_buffers_are_large_enough(schedule, data):
    plan = make_plan(schedule, data)
    sizes = [tile.numel for tile in schedule.tiles]
    assert all(sizes[idx] <= schedule.slot_numel for idx in plan.device_tiles)
    if schedule.weights_on_host:
        assert schedule.staging_numel == 0
        assert all(sizes[idx] <= schedule.outbox_numel for idx in plan.resident_tiles)
    else:
        assert schedule.outbox_numel == 0
        assert all(sizes[idx] <= schedule.staging_numel for idx in plan.host_tiles)


@given(schedules, st.data())
def test_weights_are_sent_to_the_device_only_where_they_live_there(schedule, data):
    plan = make_plan(schedule, data)
    sent = {action.tile for action in plan.actions if action.kind is Kind.WEIGHTS}
    flushed = {action.tile for action in plan.actions if action.kind is Kind.STATE_FLUSH}
    if schedule.weights_on_host:
        assert sent == set()
        assert flushed == {*plan.device_tiles, *plan.resident_tiles}
    else:
        assert sent == set(plan.host_tiles)
        assert flushed == set(plan.device_tiles)


@given(schedules, st.data(), st.sets(st.integers(0, 11)))
def test_subgroups_forced_to_the_host_pass_through_no_slot(schedule, data, forced):
    plan = make_plan(schedule, data, frozenset(forced))
    assert not {schedule.tiles[idx].subgroup for idx in plan.device_tiles} & forced


@given(schedules, st.data())
def test_text_form_round_trips(schedule, data):
    plan = make_plan(schedule, data)
    assert Plan.parse(str(plan)) == plan


@given(schedules)
def test_a_fixed_policy_issues_the_devices_work_first_where_there_is_room(schedule):
    if schedule.dynamic:
        return
    arrivals = AllAtOnce(range(len(schedule.tiles)))
    actions = schedule.actions(arrivals, None, lambda wait: True)
    kinds = [action.kind for action in actions]
    if Kind.HOST_STEP in kinds:
        assert Kind.PREFETCH not in kinds[kinds.index(Kind.HOST_STEP) :]
