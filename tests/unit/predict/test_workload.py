"""Models and workloads: sizes as the harness has them, subgroups as DeepSpeed has them."""

import pytest
from predicted_software import SOFTWARE

from configs.study import default_study
from deep_optimizer_states.predict.model import (
    ModelError,
    load_model,
    model_from_table,
)
from deep_optimizer_states.predict.workload import (
    STOCK,
    Workload,
    WorkloadError,
    cut_into_subgroups,
    workload_of_json,
)

MODEL = load_model("7B")[0]
HARNESS_MODELS = default_study().files("models")


@pytest.mark.parametrize("name", HARNESS_MODELS)
def test_models_are_those_of_the_harness(name):
    """The package ships its own table, since it is installed without the harness."""
    own, theirs = (load_model(each) for each in (name, HARNESS_MODELS[name]))
    assert own[0] == theirs[0]
    assert own[1]["micro_batch_size"] == theirs[1]["micro_batch_size"]
    model, _ = default_study().load_model(name)
    assert load_model(name)[0].numel == model.num_parameters(1)
    assert load_model(name)[0].padded_vocab_size(2) == model.padded_vocab_size(2)


# As DeepSpeed printed them in the authors' runs.
def test_subgroups_are_those_that_deepspeed_printed():
    got = Workload(load_model("8.3B")[0], dp=4, subgroup_numel=100_000_000).subgroups
    assert len(got) == 22
    assert got[:4] == (102338304, 111875328, 100471296, 114235392)
    assert got[-1] == 38634240
    got = Workload(MODEL, dp=1, subgroup_numel=10_000_000).subgroups
    assert len(got) == 130
    assert got[:5] == (206045184, 16781312, 20971520, 90181632, 45088768)


def test_a_subgroup_closes_when_it_is_full_and_partitions_are_rounded_up():
    assert cut_into_subgroups([10, 10, 5], 1, 15) == (20, 5)
    assert cut_into_subgroups([10, 10], 3, 4) == (4, 4)
    assert cut_into_subgroups([10], 1, 10) == (10,)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"offload_ratio": 1.5}, "offload_ratio = 1.5"),
        ({"offload_ratio": -0.1}, "offload_ratio = -0.1"),
        ({"offload_ratio": float("nan")}, "offload_ratio = nan"),
        ({"hog_share": 1.0}, "hog_share = 1.0"),
        ({"dp": 0}, "dp = 0: give a whole number"),
        ({"dp": 2.0}, "dp = 2.0"),
        ({"stride": 0}, "stride = 0"),
        ({"micro_batch_size": -1}, "micro_batch_size = -1"),
        ({"tile_numel": 17}, "tile_numel = 17"),
        ({"tp": 3}, "tp = 3: the model's heads 32"),
        ({"policy": "dinamic"}, "did you mean 'dynamic'"),
        ({"dtype": "fp8"}, "dtype = 'fp8'"),
        ({"stage": 4}, "stage = 4: .*known: 0, 1, 2, 3"),
        ({"optimizer_at": "disk"}, "optimizer_at = 'disk'"),
        ({"policy": "ratio"}, "needs offload_ratio below 1"),
        ({"software": SOFTWARE["stride-0.13"], "stride": 1}, "stride = 1"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(fields, words):
    with pytest.raises(WorkloadError, match=words):
        Workload(MODEL, **fields)


def test_a_configuration_says_what_a_workload_is():
    config = {
        "bf16": {"enabled": True},
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 3,
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu", "ratio": 0.5},
            "reduce_bucket_size": 1e6,
            "sub_group_size": 1e7,
            "stage3_max_live_parameters": 1e8,
            "overlap_comm": False,
        },
    }
    fields = {
        "dp": 2, "micro_batch_size": 2, "sequence_length": 8, "accumulation": 3,
        "live_numel": 10**8, "bucket_numel": 10**6, "subgroup_numel": 10**7,
    }  # fmt: skip
    given = {"dp": 2, "sequence_length": 8}
    assert workload_of_json(config, MODEL, **given) == Workload(
        MODEL, STOCK, offload_ratio=0.5, **fields
    )
    config["deep_optimizer_states"] = {"enabled": True, "policy": "stride", "stride": 3}
    found = workload_of_json(config, MODEL, **given)
    fields["device_memory_bytes"] = "auto"  # as the engine's default
    assert found == Workload(MODEL, policy="stride", stride=3, **fields)
    config["deep_optimizer_states"]["device_memory_bytes"] = 0
    found = workload_of_json(config, MODEL, **given)
    assert found == Workload(
        MODEL, policy="stride", stride=3, **{**fields, "device_memory_bytes": 0}
    )
    found = workload_of_json({}, MODEL)
    assert (found.stage, found.dtype, found.optimizer_at) == (0, "fp32", "none")
    assert (found.software, found.subgroup_numel) == (STOCK, 10**9)


def test_types_of_state_are_read_as_deepspeed_reads_them():
    narrow = {"optimizer": {"params": {"fp32_optimizer_states": False}}}
    masters = {"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}}
    for config, types in (
        ({"fp16": {"enabled": True}}, ("fp32", "fp32")),
        (narrow, ("fp32", "fp32")),  # moments as the master weights, which are fp32
        (masters, ("fp16", "fp32")),
        ({**masters, **narrow}, ("fp16", "fp16")),
    ):
        found = workload_of_json(config, MODEL)
        assert (found.masters, found.moments) == types


@pytest.mark.parametrize(("zero", "numel"), [({}, 2**20), ({"sub_group_size": 3e6}, 3e6)])
def test_below_stage_3_subgroups_are_tiles_unless_they_are_given(zero, numel):
    offload = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    block = {"enabled": True, "tile_numel": 2**20}
    config = {"zero_optimization": offload | zero, "deep_optimizer_states": block}
    assert workload_of_json(config, MODEL, dp=2).subgroups[0] == numel


def test_a_model_is_read_from_any_file(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('name = "mine"\nhidden = 64\nffn = 128\nlayers = 2\nheads = 4\nkv_heads = 2\n')
    found, defaults = load_model(path)
    assert (found.layers, defaults) == (2, {})
    with pytest.raises(ModelError, match=r"unknown model '8B': did you mean '.+'"):
        load_model("8B")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden": 0}, "hidden = 0"),
        ({"hidden": 65}, "multiple of heads"),
        ({"width": 1}, "unknown key 'width'"),
        ({"ffn": None}, "ffn is missing"),
    ],
)
def test_a_wrong_model_is_refused(change, words):
    table = {"name": "m", "hidden": 64, "ffn": 128, "layers": 2, "heads": 4, "kv_heads": 2} | change
    with pytest.raises(ModelError, match=words):
        model_from_table({name: value for name, value in table.items() if value is not None})
