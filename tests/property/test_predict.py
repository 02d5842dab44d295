"""What must hold of a prediction whatever the rates are."""

import dataclasses

from hypothesis import assume, given, settings, strategies as st
from predicted_software import SOFTWARE

from deep_optimizer_states.predict.machine import load_machine
from deep_optimizer_states.predict.model import Model
from deep_optimizer_states.predict.predict import bound_update_s, predict
from deep_optimizer_states.predict.simulated_update import LANES, simulate_update
from deep_optimizer_states.predict.workload import Workload

BASE = load_machine("h100x4")
SHAPE = Model("any", 1024, 2816, 8, 16, 4)
POLICIES = ("all-host", "stride", "all-device", "dynamic")
gigabytes = st.floats(8e9, 80e9)
parameters = st.floats(0.5e9, 8e9)


@st.composite
def machines(draw):
    rates = dataclasses.replace(
        BASE.rates,
        h2d_bytes_per_s=draw(gigabytes),
        d2h_bytes_per_s=draw(gigabytes),
        pageable_h2d_bytes_per_s=draw(gigabytes),
        host_adam_parameters_per_s=((24, draw(parameters)),),
        host_fused_parameters_per_s=((24, draw(parameters)),),
        host_stream_bytes_per_s=((24, 200e9), (96, draw(st.floats(200e9, 3000e9)))),
        device_adam_parameters_per_s=draw(st.floats(5e9, 200e9)),
    )
    # Room for all gradients, or for some, or for none.
    device_memory = draw(st.sampled_from([BASE.device_memory_bytes, 4.8e9, 5e9, 5.3e9, 2e9]))
    return dataclasses.replace(BASE, rates=rates, device_memory_bytes=device_memory)


def busy_s(run, lane):
    """Seconds that a lane worked."""
    return sum(job.end_s - job.begin_s for job in run.jobs if job.lane == lane)


ON_THE_DEVICE, ON_THE_HOST = st.just("none"), st.just("cpu")
EITHER = ON_THE_DEVICE | ON_THE_HOST
"""Where 16-bit weights live."""


@st.composite
def workloads(
    draw,
    engines=("stock-0.13", "all-host-0.13", "stride-0.13", "stock", "plugin"),
    on_host=ON_THE_DEVICE,
):
    engine = draw(st.sampled_from(engines))
    size = draw(st.integers(10**6, 10**7))
    if draw(st.booleans()):
        numels = (size,) * draw(st.integers(1, 30))
    else:
        numels = tuple(draw(st.lists(st.integers(1000, 10**7), min_size=1, max_size=20)))
    return Workload(
        SHAPE,
        SOFTWARE[engine],
        dp=draw(st.sampled_from([1, 2, 4])),
        stride=draw(st.integers(2 if engine == "stride-0.13" else 1, 8)),
        offload_ratio=draw(st.sampled_from([1.0, 1.0, 0.75, 0.5, 0.0])),
        tile_numel=draw(st.sampled_from([2**16, 2**18, 2**20])),
        weights_at=draw(on_host),
        subgroup_numels=numels,
    )


@settings(max_examples=40, deadline=None)
@given(
    workloads() | workloads(("stock", "plugin"), ON_THE_HOST), machines(), st.sampled_from(POLICIES)
)
def test_a_simulated_update_is_a_valid_plan_no_lane_of_which_works_longer_than_it_lasts(
    workload, machine, policy
):
    run = simulate_update(dataclasses.replace(workload, policy=policy), machine)
    assert set(run.ready_s) == set(range(run.plan.num_tiles))
    end = max(job.end_s for job in run.jobs)
    assert all(busy_s(run, lane) <= end * (1 + 1e-9) for lane in LANES)
    assert run.seconds <= end


@settings(max_examples=25, deadline=None)
@given(workloads(("plugin",), EITHER), machines(), st.sampled_from(POLICIES))
def test_nothing_beats_the_bound(workload, machine, policy):
    assume(workload.offload_ratio == 1.0)
    bound = bound_update_s(workload, machine)
    # The bound's device shares are those of a grid of 200.
    assert simulate_update(
        dataclasses.replace(workload, policy=policy), machine
    ).seconds >= bound * (1 - 1 / 50)


@settings(max_examples=25, deadline=None)
@given(workloads(), machines(), st.integers(1, 4))
def test_phases_add_up_and_grow_with_accumulation(workload, machine, more):
    once = predict(workload, machine)
    total = once.forward_s + once.backward_s + once.update_s + once.outside_s - once.hidden_s
    assert once.iteration_s - total < 1e-9
    assert 0 <= once.hidden_s <= once.update_s + 1e-9
    assert 0 < once.bound_s <= once.iteration_s
    longer = predict(
        dataclasses.replace(workload, accumulation=workload.accumulation + more), machine
    )
    assert longer.forward_s > once.forward_s
    assert longer.update_s == once.update_s
