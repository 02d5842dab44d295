import pytest

from configs.study import load_study, make_point
from deep_optimizer_states.predict.memory import GIB
from launch import estimate as module
from launch.ds_json import deepspeed_config
from launch.estimate import TimeLimit, estimate
from launch.fit import HALF_TYPES, Machine
from launch.records.identity import settings_key
from launch.simulate import workloads
from optimus_cc.predict import main as optimus_cc_predict

CPU = Machine(20 * GIB)
GPUS = Machine(500 * GIB, (80 * GIB,) * 4)


def seconds(machine=CPU, **fields):
    return estimate(make_point({"model": "tiny", **fields}), machine).seconds


def test_more_work_takes_longer():
    base = seconds()
    assert seconds(iterations=40) > base
    assert seconds(model="7B") > 100 * base
    assert seconds(accumulation=8) > base
    assert seconds(accumulation=40) > seconds(iterations=40)
    seven = {"model": "7B", "dp": 4, "global_batch_size": 4}
    assert seconds(GPUS, **seven) < seconds(CPU, **seven) / 10
    assert seconds(GPUS, **seven, hog_share=0.8) > seconds(GPUS, **seven)


def test_more_cores_make_a_cpu_faster(monkeypatch):
    monkeypatch.setattr(module, "usable_cores", lambda: 2)
    slow = seconds(model="1.3B")
    monkeypatch.setattr(module, "usable_cores", lambda: 16)
    assert seconds(model="1.3B") < slow / 4


def test_ranks_that_share_a_core_start_one_after_another(monkeypatch):
    monkeypatch.setattr(module, "usable_cores", lambda: 1)
    assert seconds(dp=4, global_batch_size=8) > 4 * module.CPU_START_S


def test_it_says_what_it_comes_from():
    point = make_point({"model": "tiny"})
    assert estimate(point, CPU).how == "rough, from the model's size"
    assert estimate(point, GPUS).how == "rough, from the rates of h200x1"


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


def test_a_run_that_the_model_does_not_know_is_not_predicted_on_gpus(monkeypatch):
    def change(point):
        return deepspeed_config(point) | {"zero_optimization": {"stage": 1}}

    monkeypatch.setattr(workloads, "deepspeed_config", change)
    found = estimate(make_point({"model": "tiny", "seed": 77}), GPUS)
    assert found.seconds is None
    assert found.how.startswith("not predicted: zero_optimization.stage = 1: ")


@pytest.mark.parametrize("study", ["interleaved", "zero-ladder"])
def test_bf16_takes_longer_where_torch_has_no_product_of_it(study):
    slow = Machine(20 * GIB, half_types=frozenset)
    points = {t: load_study(study).make_point({"model": "tiny", "dtype": t}) for t in HALF_TYPES}
    assert estimate(points["bf16"], slow).seconds > 1.5 * estimate(points["bf16"], CPU).seconds
    assert estimate(points["fp16"], slow) == estimate(points["fp16"], CPU)


def pipeline(**fields):
    study = load_study("optimus-cc")
    return study.make_point({"model": "gpt2-2.5B", "iterations": 10, **fields})


def test_a_pipeline_on_gpus_is_simulated_as_its_own_predictions_are(capsys):
    found = estimate(pipeline(), GPUS)
    assert found.how == "rough, from the rates of a100x64"
    assert optimus_cc_predict(["--model", "2.5B", "--scheme", "uncompressed"]) == 0
    head, row = (line.split() for line in capsys.readouterr().out.splitlines()[3:])
    iteration_ms = float(row[head.index("iteration_ms") + 1])  # the link is two words
    expected_s = module.GPU_START_S + 10 * iteration_ms / 1e3
    # The study's vocabulary is padded to another multiple.
    assert found.seconds == pytest.approx(expected_s, rel=0.01)
    assert estimate(pipeline(engine="cb+fe"), GPUS).seconds < found.seconds


def test_a_pipeline_that_is_not_predicted_says_why():
    found = estimate(pipeline(dtype="fp16"), GPUS)
    assert found.seconds is None
    assert found.how.startswith("not predicted: dtype = 'fp16'")
    point = pipeline()
    llama = point.model.model_copy(update={"architecture": "llama"})
    found = estimate(point.model_copy(update={"model": llama}), GPUS)
    assert found.how.startswith("not predicted: architecture = 'llama'")


def test_a_run_that_would_take_longer_than_what_is_left_is_refused():
    now = [100.0]
    limit = TimeLimit(100, lambda: now[0])
    now[0] += 70
    assert limit.refuse(10) == ""
    assert limit.refuse(40) == "it takes about 40 s, and 30 s of --minutes are left"
    now[0] += 30
    assert limit.refuse(0.0) == "it takes about 0 s, and 0 s of --minutes are left"
    now[0] += 5
    assert limit.left_s == 0
