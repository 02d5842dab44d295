"""Lower bounds against values worked out by hand."""

import dataclasses

import pytest

from benchmarks.bound import Limits, iteration_bound, read_limits, update_bound

GPU = Limits(
    h2d_bytes_per_s=50e9,
    d2h_bytes_per_s=50e9,
    lane_bytes_per_s=100e9,
    host_bytes_per_s=1e15,
    device_parameters_per_s=1e15,
)
CPU = Limits(None, None, 28e9, 28e9, None)
N = 10**9


def test_link_and_cpu_lane_meet_where_both_are_busy_all_the_time():
    # (2 + 10x) / 50 = 28 (1 - x) / 100  =>  x = 0.5, after which 7 / 50 s.
    bound = iteration_bound(N, GPU, compute_s=0.0)
    assert bound.device_share == pytest.approx(0.5, abs=2e-3)
    assert bound.seconds == pytest.approx(0.14, rel=5e-3)


def test_computing_bounds_a_long_iteration():
    bound = iteration_bound(N, GPU, compute_s=3.0)
    assert (bound.seconds, bound.bound_by) == (3.0, "computing")


def test_host_memory_counts_copies_too():
    narrow = dataclasses.replace(GPU, host_bytes_per_s=100e9)
    # 24x + 32(1-x) falls with x while the link's time grows: they meet where 2 + 10x = (32 - 8x)/2.
    bound = iteration_bound(N, narrow, compute_s=0.0)
    assert bound.device_share == pytest.approx(1.0, abs=2e-3)
    assert bound.seconds == pytest.approx(0.24, rel=5e-3)


def test_an_update_sends_weights_and_state_and_brings_state_back():
    bound = update_bound(N, GPU)
    assert bound.seconds == pytest.approx(0.14, rel=5e-3)
    narrow_up = dataclasses.replace(GPU, d2h_bytes_per_s=20e9)
    # 12x / 20 = 28 (1 - x) / 100  =>  x = 0.28 / 0.88.
    assert update_bound(N, narrow_up).device_share == pytest.approx(0.318, abs=2e-3)


def test_an_update_brings_no_gradients_over_the_link():
    one_way = dataclasses.replace(GPU, d2h_bytes_per_s=1e6)
    assert update_bound(N, one_way).device_share == 0
    assert update_bound(N, one_way).seconds == pytest.approx(0.28)
    # An iteration brings gradients the same way, even when everything is updated on the CPU.
    assert iteration_bound(N, one_way, 0.0).seconds == pytest.approx(2e9 / 1e6)


def test_adam_on_the_device_is_a_limit():
    slow = dataclasses.replace(GPU, device_parameters_per_s=1e9)
    bound = update_bound(N, slow)
    assert bound.device_share < 0.25
    assert bound.seconds < 0.28


def test_without_a_device_nothing_overlaps():
    assert update_bound(N, CPU).seconds == pytest.approx(1.0)
    assert iteration_bound(N, CPU, compute_s=2.0).seconds == pytest.approx(3.0)


def test_limits_come_from_a_calibrated_profile(tmp_path):
    profile = tmp_path / "machine.toml"
    profile.write_text(
        "[rates]\nh2d_bytes_per_s = 50e9\nh2d_both_bytes_per_s = 40e9\nd2h_bytes_per_s = 30e9\n"
        "host_stream_bytes_per_s = [[1, 12e9], [8, 90e9]]\n"
    )
    limits = read_limits(profile)
    assert limits == Limits(40e9, 30e9, 90e9, 90e9, None)


def test_a_profile_without_host_memory_is_refused(tmp_path):
    profile = tmp_path / "machine.toml"
    profile.write_text("[rates]\nh2d_bytes_per_s = 50e9\n")
    with pytest.raises(ValueError, match="host_stream_bytes_per_s"):
        read_limits(profile)
