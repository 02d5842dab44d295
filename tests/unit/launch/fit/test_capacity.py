import pytest

from configs.errors import ConfigError
from configs.study import default_study, make_point
from deep_optimizer_states.config import DEFAULT_TILE_NUMEL
from deep_optimizer_states.predict.memory.peaks import GIB
from launch.ds_json import deepspeed_config
from launch.fit import capacity
from launch.fit.capacity import (
    MARGIN,
    Need,
    largest_model_that_fits,
    memory_text,
    predict,
    refuse_if_short,
    runs_on_gpu,
    shortages,
    unused_gpus,
)
from launch.fit.machine import Machine
from launch.simulate import workloads

LAPTOP = Machine(host_free_bytes=12 * GIB)
H100_NODE = Machine(host_free_bytes=480 * GIB, gpu_free_bytes=(79 * GIB,) * 4)
SMALL_GPU = Machine(host_free_bytes=480 * GIB, gpu_free_bytes=(16 * GIB,))


def point(model, **fields):
    return make_point({"model": model, "dp": 1, **fields})


def test_stock_needs_at_least_eighteen_host_bytes_a_parameter():
    need = predict(point("7B"), on_gpu=True)
    assert 18 * 5_948_837_888 < need.host_bytes < 25 * 5_948_837_888


def test_the_plugin_saves_the_fp32_gradients():
    stock, plugin = (predict(point("7B", engine=e), True) for e in ("vanilla", "async-gradients"))
    assert stock.host_bytes - plugin.host_bytes > 4 * 5_948_837_888
    assert stock.device_bytes == plugin.device_bytes


def test_the_hybrid_update_adds_three_slots_of_a_tile():
    stock, hybrid = (
        predict(point("20B", **e), True) for e in ({}, {"engine": "hybrid", "stride": 2})
    )
    extra = hybrid.device_bytes - stock.device_bytes
    assert extra == pytest.approx(MARGIN * 3 * 14 * DEFAULT_TILE_NUMEL)


def test_a_smaller_ratio_moves_state_from_host_to_device():
    whole, half = (predict(point("7B", offload_ratio=r), True) for r in (1.0, 0.5))
    assert half.host_bytes < whole.host_bytes
    assert half.device_bytes > whole.device_bytes + 8 * 5_000_000_000


def test_on_a_cpu_the_host_holds_everything():
    on_gpu, on_cpu = (predict(point("1.3B"), on_gpu) for on_gpu in (True, False))
    assert on_cpu.device_bytes == 0
    assert on_cpu.host_bytes > predict(point("1.3B"), True).host_bytes - 5 * GIB
    assert on_gpu.device_bytes > 0


def test_materialised_scores_and_kept_activations_cost_device_memory():
    plain = predict(point("7B"), True).device_bytes
    assert predict(point("7B", attention="sdpa"), True).device_bytes < plain
    assert predict(point("7B", activation_checkpointing=False), True).device_bytes > plain


def test_ranks_share_the_device_memory_and_add_up_in_the_host():
    one, four = (predict(make_point({"model": "20B", "dp": dp}), True) for dp in (1, 4))
    assert four.device_bytes < one.device_bytes
    assert four.host_bytes == pytest.approx(one.host_bytes, rel=0.2)


def test_a_model_that_does_not_fit_is_refused_with_what_is_needed_and_free():
    with pytest.raises(ConfigError, match=r"7B .* \d+\.\d GiB of host memory needed, 12\.0 GiB"):
        refuse_if_short(point("7B"), LAPTOP)
    with pytest.raises(ConfigError, match=r"GiB of GPU memory needed, 16\.0 GiB free"):
        refuse_if_short(point("7B"), SMALL_GPU)


def test_more_ranks_than_gpus_are_refused(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert shortages(make_point({"model": "20B"}), SMALL_GPU) == [
        "tp 1 x pp 1 x dp 4 needs 4 GPUs, 1 found"
    ]
    assert "needs 1 GPUs, 0 found" in shortages(point("tiny", device="cuda"), LAPTOP)[0]


def test_the_remedy_for_lacking_gpus_is_fewer_ranks(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with pytest.raises(ConfigError) as caught:
        refuse_if_short(make_point({"model": "7B", "dp": 4}), SMALL_GPU)
    assert "needs 4 GPUs, 1 found (CUDA_VISIBLE_DEVICES=3). Give --dp 1 or --device cpu" in str(
        caught.value
    )
    assert "smaller model" not in str(caught.value)


def test_one_process_beside_unused_gpus_is_told_what_would_use_them():
    said = unused_gpus(point("tiny", micro_batch_size=2, global_batch_size=2), H100_NODE)
    assert said == (
        "1 of 4 GPUs used (tp 1 x pp 1 x dp 1); --dp 4 with --global-batch-size a multiple of 8 "
        "uses 4"
    )
    whole = make_point({"model": "tiny", "dp": 4, "global_batch_size": 8})
    assert unused_gpus(whole, H100_NODE) == ""
    assert unused_gpus(point("tiny", device="cpu"), H100_NODE) == ""
    assert unused_gpus(point("tiny"), LAPTOP) == ""


def test_the_device_decides_where_ranks_run():
    assert not runs_on_gpu(point("tiny"), LAPTOP)
    assert runs_on_gpu(point("tiny"), SMALL_GPU)
    assert not runs_on_gpu(point("tiny", device="cpu"), SMALL_GPU)


@pytest.mark.parametrize(
    ("machine", "model"),
    [
        (H100_NODE, "20B"),
        (SMALL_GPU, "3B"),
        (Machine(120 * GIB, (139 * GIB,)), "3B"),
        (Machine(160 * GIB, (139 * GIB,)), "7B"),
        (Machine(4 * GIB, (139 * GIB,)), None),
    ],
)
def test_auto_takes_the_largest_model_that_fits(machine, model):
    def choose():
        return largest_model_that_fits(
            default_study().model_names(), lambda name: [point(name)], machine
        )

    if model is None:
        with pytest.raises(ConfigError, match="tiny"):
            choose()
    else:
        assert choose() == model


def test_the_tiny_model_fits_a_laptop():
    assert shortages(point("tiny"), LAPTOP) == []
    assert isinstance(predict(point("tiny"), False), Need)


def test_gradients_summed_in_fp32_take_two_bytes_more():
    plain, wide = (
        predict(point("7B", grad_accum_dtype=dtype), True).host_bytes for dtype in ("bf16", "fp32")
    )
    assert wide - plain == pytest.approx(MARGIN * 2 * 5_948_837_888)


@pytest.fixture
def unknown(monkeypatch):
    """Every point runs with software that the performance model does not know."""

    def change(point):
        config = deepspeed_config(point)
        config["zero_optimization"]["offload_optimizer"]["super_offload"] = True
        return config

    monkeypatch.setattr(workloads, "deepspeed_config", change)


def test_of_a_run_that_is_not_known_the_least_that_its_engine_needs_counts(unknown):
    assert shortages(point("7B"), H100_NODE) == []
    refuse_if_short(point("7B"), H100_NODE)
    assert memory_text(point("7B"), H100_NODE).startswith(
        "not predicted: offload_optimizer.super_offload = True: the performance model knows"
    )
    with pytest.raises(ConfigError, match=r"GiB of host memory needed, 12\.0 GiB free"):
        refuse_if_short(point("70B"), LAPTOP)
    with pytest.raises(ConfigError, match="needs 1 GPUs, 0 found"):
        refuse_if_short(point("tiny", device="cuda"), LAPTOP)
    assert memory_text(point("tiny", device="cuda"), LAPTOP).endswith("needs 1 GPUs, 0 found")


def test_other_stages_have_a_need_too():
    """Of them the performance model knows no time, but their memory is known all the same."""
    fields = [
        {"zero_stage": 2, "offload_optimizer": "none"},
        {"zero_stage": 2},
        {"offload_optimizer": "none"},
        {"offload_param": "cpu"},
        {"zero_stage": 2, "offload_optimizer": "none", "dp": 4},
    ]
    needs = [capacity._need(make_point({"model": "7B", "dp": 1, **each}), True) for each in fields]
    assert [unknown for _, unknown in needs] == [""] * len(fields)
    second, offloaded, third, params, ranks = (need for need, _ in needs)
    states = 16 * 5_948_837_888
    assert second.device_bytes > states > offloaded.device_bytes
    assert offloaded.host_bytes > 18 * 5_948_837_888 > second.host_bytes
    assert third.device_bytes > states
    assert params.device_bytes < offloaded.device_bytes
    assert ranks.device_bytes < 0.6 * second.device_bytes


@pytest.mark.parametrize("policy", ["dynamic", "auto", "all-device"])
def test_every_policy_of_the_plugin_has_a_need(monkeypatch, policy):
    def change(point):
        return deepspeed_config(point) | {
            "deep_optimizer_states": {"enabled": True, "policy": policy}
        }

    monkeypatch.setattr(workloads, "deepspeed_config", change)
    need = predict(point("7B"), True)
    assert need.device_bytes > 3 * 14 * DEFAULT_TILE_NUMEL
    assert memory_text(point("7B"), H100_NODE).endswith("fits this machine")
    assert "(as on a GPU of profile h200x1; none here)" in memory_text(
        point("7B", device="cuda"), LAPTOP
    )
