"""Any plan from any policy updates every element once, in chains that are whole and in order."""

from hypothesis import given, strategies as st

from deep_optimizer_states.plan import Kind, Plan
from deep_optimizer_states.schedule import Schedule

numels = st.lists(st.integers(0, 500), max_size=12)
policies = st.sampled_from(["all-host", "ratio", "stride", "all-device", "dynamic"])
schedules = st.builds(
    Schedule.make,
    numels,
    policies,
    st.integers(1, 9),
    st.floats(0, 1),
    st.integers(1, 20).map(lambda n: 16 * n),
)


def make_plan(schedule, data, host_subgroups=frozenset()):
    actions = schedule.actions(host_subgroups, lambda: data.draw(st.booleans()))
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


@given(schedules, st.data())
def test_buffers_are_large_enough(schedule, data):
    plan = make_plan(schedule, data)
    sizes = [tile.numel for tile in schedule.tiles]
    assert all(sizes[idx] <= schedule.slot_numel for idx in plan.device_tiles)
    assert all(sizes[idx] <= schedule.staging_numel for idx in plan.host_tiles)


@given(schedules, st.data(), st.sets(st.integers(0, 11)))
def test_subgroups_forced_to_the_host_pass_through_no_slot(schedule, data, forced):
    plan = make_plan(schedule, data, frozenset(forced))
    assert not {schedule.tiles[idx].subgroup for idx in plan.device_tiles} & forced


@given(schedules, st.data())
def test_text_form_round_trips(schedule, data):
    plan = make_plan(schedule, data)
    assert Plan.parse(str(plan)) == plan


@given(schedules, st.data())
def test_a_fixed_policy_issues_the_devices_work_first(schedule, data):
    if schedule.dynamic:
        return
    kinds = [action.kind for action in make_plan(schedule, data).actions]
    if Kind.HOST_STEP in kinds:
        assert Kind.PREFETCH not in kinds[kinds.index(Kind.HOST_STEP) :]
