import pytest

from deep_optimizer_states.errors import PlanError
from deep_optimizer_states.plan import Plan, build_plan, choose_device_subgroups, subgroup_offsets


def test_stride_follows_the_papers_rule():
    assert choose_device_subgroups(7, "stride", 2) == {1, 3, 5}
    assert choose_device_subgroups(7, "stride", 3) == {2, 5}
    assert choose_device_subgroups(3, "stride", 1) == {0, 1, 2}
    assert choose_device_subgroups(3, "stride", 9) == frozenset()


def test_all_host_and_all_device():
    assert choose_device_subgroups(3, "all-host", 2) == frozenset()
    assert choose_device_subgroups(3, "all-device", 2) == {0, 1, 2}


@pytest.mark.parametrize(("policy", "stride"), [("stride", 0), ("every-other", 2)])
def test_wrong_policy_is_named(policy, stride):
    with pytest.raises(PlanError, match=str(stride) if policy == "stride" else policy):
        choose_device_subgroups(4, policy, stride)


def test_text_form_of_a_stride_2_plan():
    plan = build_plan(4, {1, 3})
    assert str(plan) == "1H2D 1GPU 1D2H 3H2D 3GPU 3D2H 0CPU 0WTS 2CPU 2WTS"
    assert Plan.parse(str(plan)) == plan


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("0CPU", "it needs"),
        ("0CPU 0WTS 0CPU 0WTS", "once"),
        ("0WTS 0CPU", "in that order"),
        ("0H2D 0D2H 0GPU", "in that order"),
        ("1CPU 1WTS", "subgroup 0 gets 'nothing'"),
        ("0FLY", "0CPU"),
        ("0CPU WTS", "'WTS'"),
    ],
)
def test_broken_plans_are_refused(text, complaint):
    with pytest.raises(PlanError, match=complaint):
        Plan.parse(text)


def test_device_subgroup_out_of_range_is_refused():
    with pytest.raises(PlanError, match="5H2D"):
        build_plan(2, {5})


def test_offsets_are_running_sums():
    assert subgroup_offsets([3, 0, 5]) == [0, 3, 3]
