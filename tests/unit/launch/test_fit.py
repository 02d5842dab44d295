import functools

import pytest

from configs.errors import ConfigError
from configs.study import default_study, load_study, make_point
from configs.sweep import load_sweep
from deep_optimizer_states.config import DEFAULT_TILE_NUMEL
from deep_optimizer_states.predict.memory import GIB, arrays_of
from launch import fit
from launch.ds_json import deepspeed_config
from launch.fit import MARGIN, Machine, largest_model_that_fits, runs_on_gpu
from launch.simulate import workloads
from launch.trainers import OWN_TRAINER, TRAINERS

LAPTOP = Machine(host_free_bytes=12 * GIB)
H100_NODE = Machine(host_free_bytes=480 * GIB, gpu_free_bytes=(79 * GIB,) * 4)
SMALL_GPU = Machine(host_free_bytes=480 * GIB, gpu_free_bytes=(16 * GIB,))


predict, shortages, refuse_if_short, memory_text = (
    functools.partial(function, trainer=OWN_TRAINER)
    for function in (
        fit.predict, fit.shortages, fit.refuse_if_short, fit.memory_text
    )
)  # fmt: skip


def point(model, **fields):
    return make_point({"model": model, "dp": 1, **fields})


def test_stock_needs_at_least_eighteen_host_bytes_a_parameter():
    need = predict(point("7B"), on_gpu=True)
    assert 18 * 5_948_837_888 < need.host_bytes < 25 * 5_948_837_888


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
            default_study().model_names(), lambda name: [point(name)], machine, OWN_TRAINER
        )

    if model is None:
        with pytest.raises(ConfigError, match="tiny"):
            choose()
    else:
        assert choose() == model


@pytest.fixture
def unknown(monkeypatch):
    """Every point runs with software that the performance model does not know."""

    def change(point):
        config = deepspeed_config(point)
        config["zero_optimization"]["offload_optimizer"]["super_offload"] = True
        return config

    monkeypatch.setattr(workloads, "deepspeed_config", change)


def test_a_run_that_is_not_known_is_not_refused_and_that_is_said(unknown):
    assert shortages(point("70B"), LAPTOP) == []
    assert memory_text(point("7B"), H100_NODE) == (
        "not predicted: offload_optimizer.super_offload = True: the performance model knows stock "
        "ZeRO-3 offload and this plugin"
    )
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
    second, offloaded, third, params, ranks = (
        predict(make_point({"model": "7B", "dp": 1, **each}), True) for each in fields
    )
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


IMDB = load_study("imdb")
FILM_REVIEWS = TRAINERS["lightning"]()
PUBLISHED_GB = 7.4
"""Published of the text's card, an RTX 3090 of 24 GB, without DeepSpeed."""


def test_all_ten_strategies_for_film_reviews_fit_the_card_of_their_text():
    """A classifier has no logits over the vocabulary, which are most of what a GPT takes here."""
    points = load_sweep("strategies", IMDB).points(None)[:10]
    card = Machine(host_free_bytes=64 * GIB, gpu_free_bytes=(24 * GIB,))
    assert len({each.engine for each in points}) == 10
    for each in points:
        assert fit.shortages(each, card, FILM_REVIEWS) == []
        text = fit.memory_text(each, card, FILM_REVIEWS)
        assert text.startswith("predicted host"), text
    need = fit.predict(points[0], True, FILM_REVIEWS)
    assert need.device_bytes / 1e9 == pytest.approx(PUBLISHED_GB, rel=0.15)


PIPELINES = load_study("optimus-cc")
STAGES = TRAINERS["megatron-pipeline"]()


def staged(model, **fields):
    table = {"model": model, "engine": "uncompressed", "device": "cuda", **fields}
    return make_point(table, study=PIPELINES)


def test_each_stage_of_a_pipeline_has_a_need_of_its_own():
    """In 1F1B the first stages keep more micro-batches, the last one has the logits."""
    each = staged("gpt2-2.5B", tp=8, pp=4, dp=2, global_batch_size=512, micro_batch_size=8)
    text = fit.memory_text(each, Machine(10_000 * GIB, (80 * GIB,) * 64), STAGES)
    need = fit.predict(each, True, STAGES)
    stages = ", ".join(f"{num_bytes / GIB:.1f}" for num_bytes in need.stages)
    assert f"(a rank of each stage: {stages} GiB): fits this machine" in text
    assert list(need.stages) == sorted(need.stages, reverse=True)
    assert need.device_bytes == need.stages[0]
    state = 16 * each.model.num_parameters(8) / 8 / 4  # fp32: weight, gradient and two moments
    assert all(num_bytes > MARGIN * state for num_bytes in need.stages)
    [first, *_] = STAGES.settings(each, True)
    messages = 4 * each.model.seq_length * 8 * each.model.hidden
    arrays = {array.name: array.num_bytes for array in arrays_of(first, True)}
    assert arrays["messages between stages"] == 2 * 4 * messages
    assert "model as it is read" not in arrays  # a stage is made on its device
    logits = [each.kept.logits for each in STAGES.settings(each, True)]
    assert [found > 0 for found in logits] == [False, False, False, True]
    none = fit.memory_text(each, LAPTOP, STAGES)
    assert none.endswith("tp 8 x pp 4 x dp 2 needs 64 GPUs, 0 found")
    assert "ZeRO" not in none


def test_stages_hold_what_the_whole_model_has():
    whole = staged("gpt2-335M").model
    for tp, pp in ((1, 1), (1, 4), (8, 4)):
        settings = STAGES.settings(
            staged("gpt2-335M", tp=tp, pp=pp, dp=1, micro_batch_size=1, global_batch_size=8), True
        )
        copies = whole.padded_vocab_size(tp) * whole.hidden // tp * (pp > 1)
        norms = whole.layers * 6 * whole.hidden + (whole.seq_length + 2) * whole.hidden
        split = (whole.num_parameters(tp) - norms) / tp
        assert sum(each.numel for each in settings) == split + norms + copies
        assert [each.in_flight for each in settings] == [min(pp - n, 8) for n in range(pp)]


@pytest.mark.parametrize(("engine", "first", "last"), [("cb", 0, 1), ("cb+fe+sc", 1, 1)])
def test_what_compression_keeps_is_part_of_the_need(engine, first, last):
    fields = {"pp": 4, "dp": 2, "global_batch_size": 64, "micro_batch_size": 8}
    plain, packed = (STAGES.settings(staged("gpt2-335M", engine=e, **fields), True)
                     for e in ("uncompressed", engine))  # fmt: skip
    kept = [each.compression_bytes > 0 for each in packed]
    assert (kept[0], kept[-1]) == (bool(first), bool(last))
    assert not any(each.compression_bytes for each in plain)
