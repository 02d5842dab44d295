import pytest

from deep_optimizer_states.auto import settle_policy
from deep_optimizer_states.config import Settings

STRIDE_3 = Settings(enabled=True, policy="stride", stride=3)


@pytest.mark.parametrize(
    ("settings", "has_gpu", "num_subgroups", "policy", "words"),
    [
        (STRIDE_3, True, 3, "stride", ""),
        (STRIDE_3, True, 2, "stride", "only 2 subgroups, so none is updated on the GPU"),
        (Settings(enabled=True), False, 9, "all-host", "without a GPU"),
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
