"""The simulated update: the executor's own plans, and the order of the paper's engine."""

import dataclasses

import pytest
from predicted_software import SOFTWARE

from deep_optimizer_states.core import policies as split
from deep_optimizer_states.core.policies import RunTimeSplit
from deep_optimizer_states.core.schedule import AllAtOnce
from deep_optimizer_states.predict import simulated_update
from deep_optimizer_states.predict.machine import load_machine
from deep_optimizer_states.predict.model import load_model
from deep_optimizer_states.predict.simulated_update import rank_of, simulate_update
from deep_optimizer_states.predict.workload import Workload

MACHINE = load_machine("h100x4")
MODEL = load_model("7B")[0]
TILE = 2**20
EVEN = (TILE * 4,) * 12


def with_rates(**changes):
    return dataclasses.replace(MACHINE, rates=dataclasses.replace(MACHINE.rates, **changes))


ROOMY = with_rates(host_stream_bytes_per_s=((24, 900e9), (96, 3600e9)))


def of(engine="plugin", **fields):
    fields.setdefault("subgroup_numels", EVEN)
    return Workload(MODEL, SOFTWARE[engine], **{"dp": 4, "tile_numel": TILE, **fields})


@pytest.mark.parametrize("policy", ["all-host", "all-device"])
def test_it_runs_the_plan_that_the_executor_runs(policy):
    schedule = of(policy=policy).schedule
    arrivals = AllAtOnce(range(len(schedule.tiles)))
    expected = " ".join(map(str, schedule.actions(arrivals, None, lambda wait: True)))
    assert str(simulate_update(of(policy=policy), MACHINE).plan) == expected


def test_lanes_alone_take_what_their_rates_say():
    """The closed form: the CPU's steps and the last weights, and a pipeline of three slots."""
    rank, numel = rank_of(of(), ROOMY), sum(EVEN)
    host = simulate_update(of(policy="all-host"), ROOMY)
    last_weights_s = 2 * TILE / rank.links["h2d"]
    assert host.seconds == pytest.approx(numel / rank.host_parameters_per_s + last_weights_s)
    device = simulate_update(of(policy="all-device"), ROOMY)
    ends_s = TILE * (1 / rank.device_parameters_per_s + 12 / rank.links["d2h"])
    assert device.seconds == pytest.approx(14 * numel / rank.links["h2d"] + ends_s)
    stock = simulate_update(of("stock"), ROOMY)
    rank = rank_of(of("stock"), ROOMY)
    each_s = 1 / rank.host_parameters_per_s + 1 / rank.blocking_parameters_per_s
    assert stock.seconds == pytest.approx(numel * each_s)
    names = [run.binding for run in (host, device, stock)]
    assert names == ["host Adam", "link to and from the GPU", "host Adam"]


def test_a_host_without_bandwidth_for_all_slows_every_lane():
    busy = with_rates(host_stream_bytes_per_s=((24, 120e9), (96, 480e9)))
    roomy, slow = (simulate_update(of(stride=4, policy="stride"), m) for m in (ROOMY, busy))
    assert slow.seconds > 1.02 * roomy.seconds
    assert slow.binding == "host memory"


def split_seconds(monkeypatch, host_rate):
    """Updates of 2**31 elements by policy, on a host of its own rate; and what the link allows."""
    workload = of(dp=1, subgroup_numels=(2**26,) * 32, tile_numel=2**25)
    rank = rank_of(workload, MACHINE)
    host = {"host_parameters_per_s": host_rate, "host_bytes_per_s": 1e13}
    monkeypatch.setattr(simulated_update, "rank_of", lambda *_: dataclasses.replace(rank, **host))
    link = rank.links["h2d"]
    # A tile for the device takes 14 bytes of the link an element, one of the CPU's two.
    shares = [host_rate * part / 100 for part in range(101)]
    rates = [cpu + max(0.0, link - 2 * cpu) / 14 for cpu in shares if 2 * cpu <= link]
    policies = ("all-host", "all-device", "dynamic")
    seconds = [
        simulate_update(dataclasses.replace(workload, policy=policy), MACHINE).seconds
        for policy in policies
    ]
    return [*seconds, 2**31 / max(rates)]


@pytest.mark.parametrize("host_rate", [2e8, 6e8, 1.2e9, 2e9, 5e9, 1e10, 1.6e10, 4e10])
def test_the_dynamic_split_comes_near_the_limit_whatever_the_host(monkeypatch, host_rate):
    all_host, all_device, dynamic, limit = split_seconds(monkeypatch, host_rate)
    assert dynamic <= 1.08 * limit
    assert dynamic <= 1.001 * min(all_host, all_device)


@pytest.mark.parametrize(
    ("host_rate", "where", "name", "broken"),
    [
        (2e8, RunTimeSplit, "learn", lambda *_: None),  # no rate is known
        (2e9, split, "PIPELINE_DEPTH", 0),  # no tile on its way while one is stepped
        (1.6e10, split, "STALL_FRACTION", 2.0),  # the device is used beside a full link
    ],
)
def test_without_its_rules_the_split_does_not(monkeypatch, host_rate, where, name, broken):
    """Negative control."""
    monkeypatch.setattr(where, name, broken)
    *_, dynamic, limit = split_seconds(monkeypatch, host_rate)
    assert dynamic > 1.1 * limit


def test_a_dynamic_split_updates_first_what_is_needed_first():
    run = simulate_update(of(subgroup_numels=EVEN * 4, policy="dynamic"), MACHINE)
    ready = [run.ready_s[tile] / run.seconds for tile in sorted(run.ready_s)]
    assert all(at == pytest.approx(tile / len(ready), abs=0.1) for tile, at in enumerate(ready))


def test_no_slot_is_prefetched_into_before_its_flush():
    slow = with_rates(d2h_bytes_per_s=MACHINE.rates.d2h_bytes_per_s / 4)
    run = simulate_update(of(policy="all-device"), slow)
    flushed = [job for job in run.jobs if job.lane == "D2H"]
    prefetched = sorted((job for job in run.jobs if job.lane == "H2D"), key=lambda j: j.begin_s)
    for done, later in zip(flushed, prefetched[3:], strict=False):
        assert later.begin_s >= done.end_s


def test_weights_that_go_home_are_there_before_the_state_is():
    run = simulate_update(of(weights_at="cpu", policy="all-device"), MACHINE)
    ends = {job.what: job.end_s for job in run.jobs}
    for tile, ready_s in run.ready_s.items():
        assert ready_s == ends[f"weights {tile}"] < ends[f"flush {tile}"]


def test_a_fifth_host_step_waits_for_the_first_staging_buffer():
    # Sending weights takes ten times as long as stepping.
    rank = rank_of(of(), MACHINE)
    slow = with_rates(h2d_bytes_per_s=0.2 * rank.host_parameters_per_s)
    jobs = simulate_update(of(policy="all-host"), slow).jobs
    sent = [job for job in jobs if job.lane == "weights"]
    stepped = [job for job in jobs if job.lane == "CPU"]
    for done, later in zip(sent, stepped[4:], strict=False):
        assert later.begin_s >= done.end_s


def test_a_prefetch_waits_for_weights_that_were_sent_before_it():
    jobs = simulate_update(of(policy="stride", stride=2), MACHINE).jobs
    fetched = [job for job in jobs if job.lane == "H2D"]
    assert any(other.lane == "weights" for job in fetched for other in job.after)
    for job in fetched:
        assert all(job.begin_s >= other.end_s for other in job.after)


@pytest.mark.parametrize(
    ("engine", "resident"),
    [("stock-0.13", {9, 10, 11}), ("stride-0.13", {9, 10, 11}), ("stock", {0, 1})],
)
def test_twinflow_keeps_the_subgroups_that_each_engine_keeps(engine, resident):
    ratio = 0.75 if engine != "stock" else 0.8
    run = simulate_update(of(engine, offload_ratio=ratio), MACHINE)
    assert set(run.plan.resident_tiles) == resident
