from hypothesis import given, strategies as st

from deep_optimizer_states.plan import Kind, Plan, build_plan, choose_device_subgroups

counts = st.integers(0, 60)


@given(counts, st.sampled_from(["all-host", "stride", "all-device"]), st.integers(1, 70))
def test_policies_cover_every_subgroup_once(num_subgroups, policy, stride):
    plan = build_plan(num_subgroups, choose_device_subgroups(num_subgroups, policy, stride))
    stepped = sorted(plan.device_subgroups + plan.host_subgroups)
    assert stepped == list(range(num_subgroups))


@given(counts.flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, max(n - 1, 0))))))
def test_text_form_round_trips_and_device_work_is_issued_first(case):
    num_subgroups, chosen = case
    plan = build_plan(num_subgroups, chosen if num_subgroups else ())
    assert Plan.parse(str(plan)) == plan
    kinds = [action.kind for action in plan.actions]
    if Kind.HOST_STEP in kinds:
        assert Kind.PREFETCH not in kinds[kinds.index(Kind.HOST_STEP) :]
