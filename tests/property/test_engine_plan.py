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
        pairs = zip(cuts[::2], cuts[1::2], strict=False)
        runs += [Tile(subgroup, start, end - start) for start, end in pairs]
    return draw(st.permutations(runs))


@st.composite
def cases(draw):
    """Sizes of subgroups, runs apart in them, and a schedule of both."""
    counts = draw(numels)
    apart = draw(runs_of_elements(counts))
    way = draw(policies), draw(st.integers(1, 9)), draw(st.floats(0, 1))
    schedule = Schedule.make(counts, *way, 16 * draw(st.integers(1, 20)), apart)
    return counts, apart, dataclasses.replace(schedule, weights_on_host=draw(st.booleans()))


def make_plan(schedule, data, host_subgroups):
    order = data.draw(st.none() | st.permutations(range(len(schedule.tiles))))
    split = RunTimeSplit()
    split.pace, split.cpu_only = data.draw(st.floats(0.01, 50)), data.draw(st.booleans())

    def in_flight():
        return data.draw(st.integers(0, 5)) * schedule.slot_numel

    share = functools.partial(split.start_split, in_flight=in_flight)
    whole = range(len(schedule.tiles)) if order is None else order
    arrivals = AllAtOnce(whole, schedule.tiles_of_subgroups(host_subgroups))
    actions = schedule.actions(arrivals, share, lambda wait: wait or data.draw(st.booleans()))
    return Plan(len(schedule.tiles), tuple(actions))  # which refuses a tile stepped twice or never


@given(cases(), st.data(), st.sets(st.integers(0, 11)))
def test_every_tile_is_stepped_once_in_memory_that_is_large_enough(case, data, forced):
    _, _, schedule = case
    plan = make_plan(schedule, data, frozenset(forced))
    stepped = sorted(plan.device_tiles + plan.host_tiles + plan.resident_tiles)
    assert stepped == list(range(len(schedule.tiles)))
    assert set(plan.resident_tiles) == schedule.resident_tiles
    assert not {schedule.tiles[idx].subgroup for idx in plan.device_tiles} & forced
    # Weights are sent to the device only where they live there.
    sizes = [tile.numel for tile in schedule.tiles]
    sent = {action.tile for action in plan.actions if action.kind is Kind.WEIGHTS}
    flushed = {action.tile for action in plan.actions if action.kind is Kind.STATE_FLUSH}
    assert all(sizes[idx] <= schedule.slot_numel for idx in plan.device_tiles)
    if schedule.weights_on_host:
        assert (schedule.staging_numel, sent) == (0, set())
        assert all(sizes[idx] <= schedule.outbox_numel for idx in plan.resident_tiles)
        assert flushed == {*plan.device_tiles, *plan.resident_tiles}
    else:
        assert (schedule.outbox_numel, sent) == (0, set(plan.host_tiles))
        assert all(sizes[idx] <= schedule.staging_numel for idx in plan.host_tiles)
        assert flushed == set(plan.device_tiles)


@given(cases())
def test_tiles_cover_every_subgroup_and_runs_apart_share_none_with_others(case):
    counts, apart, schedule = case
    covered = [[] for _ in counts]
    for tile in schedule.tiles:
        covered[tile.subgroup].extend(range(tile.start, tile.start + tile.numel))
        assert tile.start % 16 == 0
    assert covered == [list(range(count)) for count in counts]
    for run in apart:
        for idx in schedule.tiles_of(run):
            tile = schedule.tiles[idx]
            assert tile.subgroup == run.subgroup
            assert tile.start >= run.start - run.start % 16
            assert tile.start + tile.numel < run.start + run.numel + 16


@given(cases(), st.data())
def test_the_order_of_use_holds_every_tile_once(case, data):
    counts, _, schedule = case
    runs = data.draw(runs_of_elements(counts))
    order = schedule.order_of_use(runs)
    assert sorted(order) == list(range(len(schedule.tiles)))
    needed = [tile for run in runs for tile in schedule.tiles_of(run)]
    assert list(order[: len(set(needed))]) == list(dict.fromkeys(needed))


@given(cases())
def test_a_fixed_policy_issues_the_devices_work_first_where_there_is_room(case):
    _, _, schedule = case
    if schedule.dynamic:
        return
    arrivals = AllAtOnce(range(len(schedule.tiles)))
    kinds = [action.kind for action in schedule.actions(arrivals, None, lambda wait: True)]
    if Kind.HOST_STEP in kinds:
        assert Kind.PREFETCH not in kinds[kinds.index(Kind.HOST_STEP) :]
