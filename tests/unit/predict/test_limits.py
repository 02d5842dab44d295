"""What limits a phase, what a change of settings gains, and state that stays on the device."""

import dataclasses

import pytest

from deep_optimizer_states.predict.limits import HOST_WORK, changes_of, limits_of
from deep_optimizer_states.predict.machine import load_machine
from deep_optimizer_states.predict.memory import (
    CONTEXT_BYTES,
    HEADROOM,
    memory_of,
    with_device_share,
)
from deep_optimizer_states.predict.model import load_model
from deep_optimizer_states.predict.predict import phases_of, predict
from deep_optimizer_states.predict.workload import STOCK, Workload, WorkloadError

H200 = load_machine("h200x1")


def of(model="1.3B", software=None, **fields):
    given = {"materialized_attention": False, "activation_checkpointing": False, **fields}
    return Workload(load_model(model)[0], software, **given)


def costing(**seconds):
    return dataclasses.replace(H200, costs=dataclasses.replace(H200.costs, **seconds))


@pytest.mark.parametrize(
    ("cost", "stages"), [("hooks_s", (1, 2)), ("layer_s", (3,)), ("grads_s", (1, 2))]
)
def test_host_work_of_a_layer_depends_on_the_stage(cost, stages):
    """ZeRO-3 gathers each module's weights, stages 1 and 2 put gradients into buckets."""
    without = costing(**{cost: 0.0})
    for stage in (1, 2, 3):
        workload = of(stage=stage, optimizer_at="none")  # no copies of gradients hide it
        now, then = (phases_of(workload, machine) for machine in (H200, without))
        differs = (now.forward_s, now.backward_s) != (then.forward_s, then.backward_s)
        assert differs == (stage in stages), stage
    layers, none = of().model.layers, phases_of(of(stage=2), costing(hooks_s=0.0))
    saved = none.forward_s - phases_of(of(stage=2), H200).forward_s
    assert saved == pytest.approx(layers * H200.costs.hooks_s)


def test_a_phase_is_limited_by_what_takes_most_of_it():
    few, many = (limits_of(of(micro_batch_size=n), H200) for n in (1, 64))
    assert few["forward"][0] == few["backward"][0] == HOST_WORK
    assert many["forward"][0] == many["backward"][0] == "matrix products"
    flat = limits_of(of("7B", STOCK, stage=2), H200)
    assert flat["backward"][0] == "copies to and from host memory"
    forward = phases_of(of(), H200).forward_s
    hooks = of().model.layers * (H200.costs.launch_s + H200.costs.layer_s)
    assert few["forward"][1] == pytest.approx(hooks)
    assert few["forward"][1] < forward


def test_changes_are_predicted_as_if_they_had_been_made():
    workload = of(software=STOCK)
    now = predict(workload, H200)
    changes = changes_of(workload, H200, now)
    found = {change.words: change for change in changes}
    assert {"the plugin", "ZeRO stage 2", "micro-batch 2"} <= found.keys()
    assert [c.gain for c in changes] == sorted((c.gain for c in changes), reverse=True)
    ours = predict(dataclasses.replace(workload, software=None, policy="auto"), H200)
    assert found["the plugin"].prediction == ours
    twice = found["micro-batch 2"]
    assert twice.gain == pytest.approx(1 - twice.prediction.iteration_s / 2 / now.iteration_s)


def test_a_change_that_does_not_fit_or_does_not_gain_is_not_named():
    workload = of()
    once, twice = (
        memory_of(dataclasses.replace(workload, micro_batch_size=n), H200).device_bytes
        for n in (1, 2)
    )
    for device_bytes, is_named in ((once + twice) / 2, False), (2 * twice, True):
        room = (device_bytes + CONTEXT_BYTES) / HEADROOM
        machine = dataclasses.replace(H200, device_memory_bytes=room)
        now = predict(workload, machine)
        words = [change.words for change in changes_of(workload, machine, now)]
        assert now.fits
        assert ("micro-batch 2" in words) is is_named
    same = costing(leaf_hooks_s=H200.costs.hooks_s)
    for machine, is_named in ((H200, True), (same, False)):
        changes = changes_of(workload, machine, predict(workload, machine))
        assert any("leaf" in change.words for change in changes) is is_named


@pytest.mark.parametrize(
    ("gib", "stage"), [*((gib, 3) for gib in (30, 40, 60, 140)), (60, 2), (141, 2), (60, 1)]
)
def test_state_stays_on_the_device_as_far_as_there_is_room(gib, stage):
    """The share is (0.9 M - P) / 14 N, and none of it leaves its place in host memory."""
    machine = dataclasses.replace(H200, device_memory_bytes=gib * 2**30)
    workload = of("7B", device_memory_bytes="auto", stage=stage)
    without = predict(dataclasses.replace(workload, device_memory_bytes=0), machine)
    numel = sum(workload.subgroups)
    peak = without.memory.device_bytes + CONTEXT_BYTES
    share = min(1, max(0, 0.9 * machine.device_memory_bytes - peak) / (14 * numel))
    assert with_device_share(workload, machine).device_share == pytest.approx(share, rel=1e-6)
    got = predict(workload, machine)
    assert got.device_share == pytest.approx(share, rel=1e-6)
    assert got.iteration_s <= without.iteration_s + 1e-9
    assert (got.update_s < without.update_s / 5) == (share == 1)
    assert got.memory.device_bytes + CONTEXT_BYTES <= 0.9 * machine.device_memory_bytes
    assert got.memory.host_bytes == pytest.approx(without.memory.host_bytes, rel=0.01)


def test_a_limit_in_bytes_is_kept_and_none_stays_under_other_engines():
    some = with_device_share(of("7B", device_memory_bytes=14e9), H200).device_share
    assert some == pytest.approx(1e9 / sum(of("7B").subgroups))
    for stage in (2, 3):
        other = of("7B", STOCK, stage=stage)
        given = dataclasses.replace(other, device_memory_bytes="auto")
        assert predict(given, H200) == predict(other, H200)


def test_the_bound_counts_adam_on_state_that_stays_on_the_device():
    """At stage 2 nothing else is left: neither copies nor DeepSpeed's work at each layer."""
    all_of_it = of("7B", stage=2, device_memory_bytes="auto")
    got, computed_s = predict(all_of_it, H200), phases_of(all_of_it, H200).computed_s
    assert got.bound_s == pytest.approx(got.iteration_s)
    assert got.bound_s == pytest.approx(computed_s + got.update_s)
    passing = predict(dataclasses.replace(all_of_it, device_memory_bytes=0), H200)
    assert passing.bound_s < 0.9 * passing.iteration_s


def test_below_stage_3_sums_of_gradients_go_home_and_come_back_wherever_the_state_is():
    workload, numel = of("1.3B", stage=2, accumulation=4), sum(of("1.3B", stage=2).subgroups)
    kept = predict(dataclasses.replace(workload, device_memory_bytes="auto"), H200)
    without = predict(workload, H200)
    assert kept.device_share == 1
    last, phases = 2 * numel / H200.rate("d2h_bytes_per_s"), phases_of(workload, H200)
    behind = min((phases.backward_s - phases.flush_s) / 4, last * (1 - 500_000_000 / numel))
    assert without.backward_s - kept.backward_s == pytest.approx(last - behind)
    assert 0 < behind < last


def test_at_stage_2_the_last_copy_of_gradients_is_hidden_behind_backward_as_stock_s_is_not():
    """At stage 1 backward has ended before anything is reduced."""
    for stage, hides in ((1, False), (2, True)):
        ours, stock = (phases_of(of("7B", who, stage=stage), H200) for who in (None, STOCK))
        last = 2 * of("7B").numel / H200.rate("d2h_bytes_per_s")
        assert stock.flush_s == pytest.approx(2 * last)  # in fp32
        assert (ours.flush_s < 0.8 * last) == hides
        assert hides or ours.flush_s == pytest.approx(last)


SHORT_OF_HOST = dataclasses.replace(H200, host_memory_bytes=128 * 2**30)


def test_what_host_memory_lacks_stays_on_the_device():
    """13B needs some 190 GiB of host memory; with 128 GiB the GPU holds the rest for good."""
    workload = of("13B", device_memory_bytes="auto", subgroup_numel=100_000_000)
    got = with_device_share(workload, SHORT_OF_HOST)
    assert 0.5 < got.offload_ratio < 1
    one_more = sum(got.subgroups) * got.offload_ratio + max(got.subgroups)
    too_much = dataclasses.replace(got, offload_ratio=one_more / sum(got.subgroups))
    usable = HEADROOM * SHORT_OF_HOST.host_memory_bytes
    assert memory_of(got, SHORT_OF_HOST).host_bytes <= usable
    assert memory_of(too_much, SHORT_OF_HOST).host_bytes > usable
    found = predict(workload, SHORT_OF_HOST)
    assert found.fits
    assert found.device_share >= 1 - got.offload_ratio
    enough = dataclasses.replace(H200, host_memory_bytes=512 * 2**30)
    assert with_device_share(workload, enough).offload_ratio == 1.0


@pytest.mark.parametrize(
    ("changed", "gib"),
    [
        ({"device_memory_bytes": 0}, 141),
        ({"device_memory_bytes": 10**9}, 141),
        ({"policy": "all-host"}, 141),
        ({"policy": "stride"}, 141),
        ({"stage": 2}, 141),
        ({}, 60),
    ],
)
def test_what_host_memory_lacks_is_refused_where_the_engine_refuses_it(changed, gib):
    machine = dataclasses.replace(SHORT_OF_HOST, device_memory_bytes=gib * 2**30)
    workload = of("13B", **{"device_memory_bytes": "auto", **changed})
    assert with_device_share(workload, machine).offload_ratio == 1.0
    (lack, *_) = predict(workload, machine).shortages
    assert lack.startswith("host memory: ")


def test_device_memory_in_bytes_has_to_be_a_number_or_auto():
    with pytest.raises(WorkloadError, match="device_memory_bytes = 'most': give bytes, or 'auto'"):
        of(device_memory_bytes="most")
