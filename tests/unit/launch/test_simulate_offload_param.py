"""Predictions of points whose 16-bit weights live in host memory."""

import dataclasses

import pytest

from configs.study import make_point
from deep_optimizer_states.predict.machine import load_machine
from deep_optimizer_states.predict.predict import predict
from deep_optimizer_states.predict.workload import WorkloadError
from launch.simulate.workloads import AsOf, workload_of

MACHINE = load_machine("h100x4")
SLOW_LINK = dataclasses.replace(
    MACHINE, rates=dataclasses.replace(MACHINE.rates, h2d_bytes_per_s=1e9)
)


@pytest.mark.parametrize("engine", [{"engine": "vanilla"}, {"engine": "hybrid", "stride": 2}])
def test_the_setting_reaches_the_workload_and_its_gathers_the_forward(engine):
    on_device, on_host = (
        workload_of(make_point({"model": "7B", **engine, **fields}), AsOf.TODAY)
        for fields in ({}, {"offload_param": "cpu"})
    )
    assert (on_device.weights_on_host, on_host.weights_on_host) == (False, True)
    seconds = [predict(each, MACHINE).forward_s for each in (on_device, on_host)]
    assert seconds[1] >= seconds[0]
    seconds = [predict(each, SLOW_LINK).forward_s for each in (on_device, on_host)]
    assert seconds[1] > 2 * seconds[0]


def test_the_papers_software_was_not_measured_so():
    point = make_point({"model": "7B", "engine": "vanilla", "offload_param": "cpu"})
    with pytest.raises(WorkloadError, match=r"offload_param\.device = 'cpu': the paper's software"):
        workload_of(point, AsOf.PAPER)
