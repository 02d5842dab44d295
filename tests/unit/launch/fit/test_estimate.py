import pytest

from configs.study import make_point
from deep_optimizer_states.predict.memory.peaks import GIB
from launch.ds_json import deepspeed_config
from launch.fit import estimate as module
from launch.fit.estimate import estimate
from launch.fit.machine import Machine
from launch.records.identity import settings_key
from launch.simulate import workloads

CPU = Machine(20 * GIB)
GPUS = Machine(500 * GIB, (80 * GIB,) * 4)


def seconds(machine=CPU, **fields):
    return estimate(make_point({"model": "tiny", **fields}), machine).seconds


def test_more_work_takes_longer():
    base = seconds()
    assert seconds(iterations=40) > base
    assert seconds(model="7B") > 100 * base
    assert seconds(accumulation=8) > base
    seven = {"model": "7B", "dp": 4, "global_batch_size": 4}
    assert seconds(GPUS, **seven) < seconds(CPU, **seven) / 10
    assert seconds(GPUS, **seven, hog_share=0.8) > seconds(GPUS, **seven)


def test_more_cores_make_a_cpu_faster(monkeypatch):
    monkeypatch.setattr(module, "usable_cores", lambda: 2)
    slow = seconds(model="1.3B")
    monkeypatch.setattr(module, "usable_cores", lambda: 16)
    assert seconds(model="1.3B") < slow / 4


@pytest.mark.parametrize(("machine", "name"), [(CPU, "cpu-only"), (GPUS, "h200x1")])
def test_it_says_whose_rates_it_is_from(machine, name):
    assert (
        estimate(make_point({"model": "tiny"}), machine).how == f"rough, from the rates of {name}"
    )


def test_ranks_of_any_number_and_split_can_be_estimated():
    point = make_point({"model": "20B", "tp": 2, "dp": 8, "global_batch_size": 8})
    for machine in (CPU, GPUS):
        assert estimate(point, machine).seconds > 0


def test_what_ran_before_goes_before_any_prediction():
    class Before:
        point_key = f"{settings_key(make_point({'model': 'tiny'}))}-data"
        status = "ok"
        seconds = 12.5

    found = estimate(make_point({"model": "tiny"}), CPU, [Before()])
    assert (found.seconds, found.how) == (12.5, "as it took before")


def test_a_run_that_the_model_does_not_know_has_no_estimate(monkeypatch):
    def change(point):
        return deepspeed_config(point) | {"zero_optimization": {"stage": 1}}

    monkeypatch.setattr(workloads, "deepspeed_config", change)
    found = estimate(make_point({"model": "tiny", "seed": 77}), CPU)
    assert found.seconds is None
    assert found.how.startswith("not predicted: zero_optimization.stage = 1: ")
