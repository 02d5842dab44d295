"""Lower bounds against values worked out by hand."""

import dataclasses

import pytest
from made_sweeps import write_sweep

from benchmarks.bound import (
    Limits,
    iteration_bound,
    main,
    read_limits,
    shares,
    update_bound,
    update_work,
)

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


BOTH_WAYS = dataclasses.replace(GPU, h2d_both_bytes_per_s=40e9, d2h_both_bytes_per_s=30e9)


def test_a_link_is_slowed_only_while_the_other_way_is_busy():
    # x = 0: 2 bytes go down and none comes up, so nothing slows the link.
    alone = update_work(N, BOTH_WAYS, 0.0)
    assert alone["link to the device"] == pytest.approx(2 / 50)
    # x = 1: 12 bytes each way. The slower way, up, takes 12 / 40 of a second beside the other at
    # 30e9, the rest at 50e9: (12 - 30 * 12 / 40) / 50 + 12 / 40.
    both = update_work(N, BOTH_WAYS, 1.0)
    assert both["link from the device"] == pytest.approx(0.3 + 3 / 50)
    assert both["link to the device"] == pytest.approx(12 / 40)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.3, 0.5, 0.8, 1.0])
@pytest.mark.parametrize("narrow", [False, True])
def test_no_update_is_shorter_than_the_bound(share, narrow):
    """A machine that works without a pause reaches the bound at best."""
    limits = dataclasses.replace(BOTH_WAYS, host_bytes_per_s=170e9 if narrow else 190e9)
    reached_s = simulated_update_s(N, limits, share) * (1 + 1e-9)  # sums of many small steps
    assert update_bound(N, limits).seconds <= reached_s
    assert max(update_work(N, limits, share).values()) <= reached_s


def simulated_update_s(parameters, limits, share, step_s=1e-4):
    """Time of an update in which both links and the CPU lane work side by side, in small steps.

    Memory that gives cores and links less than they ask for slows all of them alike.
    """
    left = {
        "down": parameters * (2 + 10 * share),
        "up": parameters * 12 * share,
        "lane": parameters * 28 * (1 - share),
    }
    seconds = 0.0
    while any(left.values()):
        rates = {
            "down": limits.h2d_both_bytes_per_s if left["up"] else limits.h2d_bytes_per_s,
            "up": limits.d2h_both_bytes_per_s if left["down"] else limits.d2h_bytes_per_s,
            "lane": limits.lane_bytes_per_s,
        }
        rates = {name: rate for name, rate in rates.items() if left[name]}
        slowed = min(1.0, limits.host_bytes_per_s / sum(rates.values()))
        for name, rate in rates.items():
            left[name] = max(0.0, left[name] - rate * slowed * step_s)
        seconds += step_s
    return seconds


def test_the_cores_alone_are_no_limit_of_what_links_and_cores_reach_together():
    """The fault this guards against: a host rate probed with idle links, passed by an update."""
    reached_s = simulated_update_s(N, dataclasses.replace(BOTH_WAYS, host_bytes_per_s=170e9), 0.4)
    by_cores_alone = dataclasses.replace(BOTH_WAYS, host_bytes_per_s=BOTH_WAYS.lane_bytes_per_s)
    assert max(update_work(N, by_cores_alone, 0.4).values()) > reached_s


def test_limits_come_from_a_calibrated_profile(tmp_path):
    profile = tmp_path / "machine.toml"
    profile.write_text(
        "[rates]\nh2d_bytes_per_s = 50e9\nh2d_both_bytes_per_s = 40e9\nd2h_bytes_per_s = 30e9\n"
        "host_stream_bytes_per_s = [[1, 12e9], [8, 90e9]]\n"
    )
    limits = read_limits(profile)
    assert limits == Limits(50e9, 30e9, 90e9, 90e9, None, h2d_both_bytes_per_s=40e9)
    with profile.open("a") as file:
        file.write("busy_memory_bytes_per_s = 150e9\n")
    busy = read_limits(profile)
    assert (busy.lane_bytes_per_s, busy.host_bytes_per_s) == (90e9, 150e9)


def test_a_profile_without_host_memory_is_refused(tmp_path):
    profile = tmp_path / "machine.toml"
    profile.write_text("[rates]\nh2d_bytes_per_s = 50e9\n")
    with pytest.raises(ValueError, match="host_stream_bytes_per_s"):
        read_limits(profile)


LOSSES = (9.0, 8.5, 8.25, 8.125, 8.0)
TIMES_S = (7.0, 7.0, 0.9, 1.0, 5.0)


def test_shares_of_the_bound_are_those_of_rows_with_all_state_on_the_host(tmp_path):
    runs = [
        ("vanilla", {}, "ok"),
        ("zenflow", {}, "ok"),
        ("resident", {"offload_ratio": 0.0}, "ok"),
        ("hybrid", {"stride": 2}, "ok"),
        ("dynamic", {"just_in_time": True}, "ok"),
        ("auto", {}, "failed"),
    ]
    (point, *_) = write_sweep(tmp_path / "gpu", [(*run, LOSSES, TIMES_S) for run in runs])
    numel = point.model.num_parameters()
    least = iteration_bound(numel, BOTH_WAYS, 0.5).seconds, update_bound(numel, BOTH_WAYS).seconds
    whole, update = f"{least[0] / 1.0:.0%}", f"{least[1] / 0.4:.0%}"
    found = {cells[0].split()[4]: cells[1:] for cells in shares(tmp_path / "gpu", BOTH_WAYS)}
    assert found == {
        "vanilla": ["1.000", whole, "0.400", update],
        "zenflow": ["1.000", "-", "-", "-"],
        "resident": ["1.000", "-", "0.400", "-"],
        "hybrid": ["1.000", whole, "0.400", update],
        "dynamic": ["1.000", whole, "-", "-"],
    }


def test_without_the_reference_there_is_no_time_of_computing_and_no_share(tmp_path, capsys):
    write_sweep(tmp_path, [("dynamic", {}, "ok", LOSSES, TIMES_S)])
    assert shares(tmp_path, BOTH_WAYS) == []
    (tmp_path / "machine.toml").write_text("[rates]\nhost_stream_bytes_per_s = [[1, 1e10]]\n")
    assert main([str(tmp_path)]) == 1
    assert "no finished run of the reference" in capsys.readouterr().err


def test_a_folder_without_runs_is_refused_before_anything_is_measured(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    assert "no runs; give the folder of a sweep" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
