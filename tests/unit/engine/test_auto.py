import pytest

from deep_optimizer_states.auto import settle_policy
from deep_optimizer_states.config import Settings

STRIDE_3 = Settings(enabled=True, policy="stride", stride=3)


@pytest.mark.parametrize(
    ("settings", "has_gpu", "num_subgroups", "policy", "words"),
    [
        (STRIDE_3, True, 3, "stride", ""),
        (STRIDE_3, True, 2, "stride", "only 2 subgroups, so none is updated on the GPU"),
        (Settings(enabled=True, just_in_time_forward=True), False, 9, "all-host", "without a GPU"),
        (Settings(enabled=True), True, 9, "auto", "begins as dynamic"),
    ],
)
def test_a_policy_that_was_given_stays_and_others_say_why(
    settings, has_gpu, num_subgroups, policy, words
):
    settled, why = settle_policy(settings, num_subgroups, has_gpu)
    assert settled.policy == policy
    assert words in why
    assert bool(words) == bool(why)
    assert settled == settings.model_copy(update={"policy": policy})


def test_without_a_gpu_step_waits_unless_it_is_asked_not_to():
    """Forward and update need the same cores then, and get in each other's way."""
    for given, is_kept in (({}, False), ({"just_in_time_forward": True}, True)):
        settled, why = settle_policy(Settings(enabled=True, **given), 9, has_gpu=False)
        assert settled.just_in_time_forward is is_kept
        assert ("step() waits" in why) is not is_kept
    settled, _ = settle_policy(Settings(enabled=True), 9, has_gpu=True)
    assert settled.just_in_time_forward
