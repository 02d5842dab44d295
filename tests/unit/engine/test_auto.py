import re

import pytest

from deep_optimizer_states.auto import settle_policy
from deep_optimizer_states.config import Settings

AUTO = Settings(enabled=True, policy="auto")
NUMELS = [100_000_000] * 20


def settle(settings, has_gpu=True, numels=NUMELS, num_ranks=1):
    return settle_policy(settings, numels, num_ranks, has_gpu)


STRIDE_3 = Settings(enabled=True, policy="stride", stride=3)


@pytest.mark.parametrize(
    ("settings", "given", "policies", "words"),
    [
        (STRIDE_3, {}, ["stride"], ""),
        (STRIDE_3, {"numels": [8] * 3}, ["stride"], ""),
        (STRIDE_3, {"numels": [8] * 2}, ["stride"], "only 2 subgroups, so none is updated on the"),
        (AUTO, {"has_gpu": False}, ["all-host"], "no GPU"),
        (AUTO, {}, ["dynamic"], "calibrate"),
        (
            AUTO.model_copy(update={"machine": "h100x4"}),
            {"num_ranks": 4},
            ["stride", "all-device", "dynamic"],
            "h100x4",
        ),
    ],
)
def test_a_policy_that_was_given_stays_and_auto_says_why(settings, given, policies, words):
    settled, why = settle(settings, **given)
    assert settled.policy in policies
    assert words in why
    assert bool(words) == bool(why)
    if settings is STRIDE_3:
        assert settled is settings


def write_profile(folder, link, fused, device_memory=8e10):
    path = folder / "machine.toml"
    path.write_text(
        f"""
name = "made up"
source = "a test"
gpus = 1
cores = 8
host_memory_bytes = 5e11
device_memory_bytes = {device_memory}
[rates]
h2d_bytes_per_s = {link}
d2h_bytes_per_s = {link}
h2d_both_bytes_per_s = {link}
d2h_both_bytes_per_s = {link}
pageable_h2d_bytes_per_s = {link}
pageable_d2h_bytes_per_s = {link}
device_flops_per_s = 4e14
device_stream_bytes_per_s = 2e12
device_adam_parameters_per_s = 9e10
gather_bytes_per_s = 2e11
host_stream_bytes_per_s = [[1, 1e12]]
host_adam_parameters_per_s = [[1, {fused / 2}]]
host_fused_parameters_per_s = [[1, {fused}]]
"""
    )
    return Settings(enabled=True, policy="auto", machine=str(path))


@pytest.mark.parametrize(
    ("link", "fused", "policies"),
    [(1e8, 1e10, ["all-host"]), (1e11, 1e7, ["all-device", "dynamic"])],
)
def test_a_slow_link_leaves_the_update_to_the_host_and_a_slow_host_to_the_gpu(
    tmp_path, link, fused, policies
):
    assert settle(write_profile(tmp_path, link, fused))[0].policy in policies


@pytest.mark.parametrize(("on_host", "seconds"), [(False, 4.0), (True, 0.2)])
def test_weights_in_host_memory_load_no_link(tmp_path, on_host, seconds):
    """Two bytes a parameter over 1 GB/s, or nothing beside 10 billion parameters a second."""
    given = write_profile(tmp_path, 1e9, 1e10)
    settings, why = settle_policy(given, NUMELS, 1, True, on_host)
    assert settings.policy == "all-host"
    predicted = re.search(r"all-host, predicted ([0-9.]+) s", why)
    assert float(predicted[1]) == pytest.approx(seconds, rel=0.05)
