"""An update of which a part runs in backward, simulated; the reference is the one after it."""

import dataclasses

import pytest

from deep_optimizer_states.plan import Kind
from deep_optimizer_states.predict.machine import load_machine
from deep_optimizer_states.predict.memory.offload import ahead_room_bytes
from deep_optimizer_states.predict.model import load_model
from deep_optimizer_states.predict.phases import phases_of
from deep_optimizer_states.predict.predict import predict
from deep_optimizer_states.predict.update_sim import simulate_update
from deep_optimizer_states.predict.workload import STATE_BYTES, Workload, schedule_of

H200 = load_machine("h200x1")
BASE = Workload(load_model("13B")[0], micro_batch_size=4, policy="all-host")
AUTO = {"prefetch_memory_bytes": "auto"}
EARLY = {"step_before_norm": True}


def of(policy="all-host", **fields):
    return dataclasses.replace(BASE, policy=policy, **fields)


def simulated(policy="all-host", **fields):
    return simulate_update(of(policy, **fields), H200, policy)


def ahead(run):
    return [action.tile for action in run.plan.actions if action.kind is Kind.AHEAD]


@pytest.mark.parametrize("policy", ["all-host", "stride", "dynamic"])
@pytest.mark.parametrize("fields", [AUTO, EARLY, EARLY | AUTO])
def test_work_in_backward_makes_the_update_and_the_iteration_shorter(policy, fields):
    before, after = simulated(policy), simulated(policy, **fields)
    assert 0 < after.seconds < before.seconds
    assert predict(of(policy, **fields), H200).iteration_s < predict(of(policy), H200).iteration_s


@pytest.mark.parametrize("policy", ["all-host", "stride", "dynamic"])
@pytest.mark.parametrize("fields", [{}, AUTO, EARLY, EARLY | AUTO])
def test_no_iteration_is_shorter_than_its_bound(policy, fields):
    found = predict(of(policy, **fields), H200)
    assert found.iteration_s >= found.bound_s


def test_the_plan_has_what_runs_before_the_norm_before_its_bar():
    plan = simulated(**EARLY | AUTO).plan
    assert 0 < plan.before_norm < len(plan.actions)
    assert simulated().plan.before_norm == 0
    early = {action.tile for action in plan.actions[: plan.before_norm]}
    last = len(schedule_of(of(), "all-host").tiles) - 1
    assert last in early, "backward is done with the last layer first"
    assert 0 in ahead(simulated(**EARLY | AUTO)), "the next forward needs the first one first"


def test_nothing_is_stepped_before_backward_is_done_with_it():
    run, phases = simulated(**EARLY), phases_of(of(**EARLY), H200)
    backward_s = phases.backward_s - phases.flush_s
    numels = [tile.numel for tile in schedule_of(of(), "all-host").tiles]
    for job in run.jobs:
        if job.what.startswith("step "):
            tile = int(job.what.split()[1])
            left = sum(numels[:tile]) / sum(numels)
            done_s = (1 - left) * backward_s - phases.backward_s
            assert job.begin_s >= done_s - 1e-9


def test_state_ahead_keeps_to_its_memory():
    numels = [tile.numel for tile in schedule_of(of(), "all-host").tiles]
    size = STATE_BYTES + 2
    few = simulated(prefetch_memory_bytes=3 * size * max(numels))
    assert len(ahead(few)) == 3
    always, freed = ahead_room_bytes(of(), H200, "all-host")
    assert freed > 0
    for limit in ("auto", 10 * int(always + freed)):
        most = ahead(simulated(prefetch_memory_bytes=limit))
        assert 0 < sum(numels[tile] * size for tile in most) <= always + freed, limit


def test_a_policy_that_gives_tiles_to_the_device_sends_those_ahead():
    run = simulated("stride", stride=4, **AUTO)
    assert ahead(run)
    assert set(ahead(run)) <= schedule_of(of("stride", stride=4), "stride").device_tiles


def test_gradients_go_home_beside_the_state_and_take_the_same_link():
    jobs = simulated("stride", **EARLY).jobs
    flushes = [job for job in jobs if job.lane == "grads"]
    assert flushes
    assert all(job.draws["d2h"] == 2 for job in flushes)


def test_without_a_gpu_nothing_runs_in_backward():
    cpu = load_machine("cpu-only")
    workload = Workload(BASE.model, policy="all-host")
    early = dataclasses.replace(workload, **EARLY)
    assert simulate_update(early, cpu, "all-host").seconds == pytest.approx(
        simulate_update(workload, cpu, "all-host").seconds
    )
