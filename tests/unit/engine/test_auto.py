import re

import pytest

from deep_optimizer_states.auto import settle_policy
from deep_optimizer_states.config import Settings
from deep_optimizer_states.errors import DeepOptimizerStatesError

AUTO = Settings(enabled=True, policy="auto")
NUMELS = [100_000_000] * 20


def settle(settings, has_gpu=True, num_ranks=1):
    return settle_policy(settings, NUMELS, num_ranks, has_gpu)


def test_a_policy_that_was_given_stays():
    given = Settings(enabled=True, policy="stride", stride=3)
    assert settle(given) == (given, "")


def test_a_stride_that_reaches_no_subgroup_is_said():
    given = Settings(enabled=True, policy="stride", stride=3)
    settled, why = settle_policy(given, [8, 8], 1, has_gpu=True)
    assert settled is given
    assert "only 2 subgroups, so none is updated on the GPU" in why
    assert settle_policy(given, [8, 8, 8], 1, has_gpu=True) == (given, "")


def test_without_a_gpu_the_cpu_does_it_all():
    settings, why = settle(AUTO, has_gpu=False)
    assert settings.policy == "all-host"
    assert "no GPU" in why


def test_without_a_profile_the_split_is_found_at_run_time():
    settings, why = settle(AUTO)
    assert settings.policy == "dynamic"
    assert "calibrate" in why


def test_a_profile_decides():
    """A slow host leaves everything to the GPU; a slow link leaves it to the host."""
    settings, why = settle(Settings(enabled=True, policy="auto", machine="h100x4"), num_ranks=4)
    assert settings.policy in ("stride", "all-device", "dynamic")
    assert "h100x4" in why


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


def test_a_slow_link_leaves_the_update_to_the_host(tmp_path):
    assert settle(write_profile(tmp_path, 1e8, 1e10))[0].policy == "all-host"


@pytest.mark.parametrize(("on_host", "seconds"), [(False, 4.0), (True, 0.2)])
def test_weights_in_host_memory_load_no_link(tmp_path, on_host, seconds):
    """Two bytes a parameter over 1 GB/s, or nothing beside 10 billion parameters a second."""
    given = write_profile(tmp_path, 1e9, 1e10)
    settings, why = settle_policy(given, NUMELS, 1, True, on_host)
    assert settings.policy == "all-host"
    predicted = re.search(r"all-host, predicted ([0-9.]+) s", why)
    assert float(predicted[1]) == pytest.approx(seconds, rel=0.05)


def test_a_slow_host_leaves_the_update_to_the_gpu(tmp_path):
    assert settle(write_profile(tmp_path, 1e11, 1e7))[0].policy in ("all-device", "dynamic")


def test_an_unknown_profile_is_refused():
    with pytest.raises(DeepOptimizerStatesError, match="h100x4"):
        settle(Settings(enabled=True, policy="auto", machine="h100x5"))
