"""Models and workloads: shapes as the harness has them, subgroups as DeepSpeed has them."""

import pytest
from predicted_software import SOFTWARE

from configs.study import default_study
from deep_optimizer_states.predict.model import (
    ModelError,
    load_model,
    model_from_table,
    model_names,
)
from deep_optimizer_states.predict.workload import Workload, WorkloadError, cut_into_subgroups


def of(model="7B", **fields):
    return Workload(load_model(model)[0], **fields)


HARNESS_MODELS = default_study().files("models")


@pytest.mark.parametrize("name", HARNESS_MODELS)
@pytest.mark.parametrize("tp", [1, 2])
def test_shapes_are_those_of_the_harness(name, tp):
    """The package ships its own table, since it is installed without the harness."""
    shape, defaults = load_model(name)
    assert (shape, defaults["micro_batch_size"]) == (
        load_model(HARNESS_MODELS[name])[0],
        load_model(HARNESS_MODELS[name])[1]["micro_batch_size"],
    )
    model, _ = default_study().load_model(name)
    assert shape.num_parameters(tp) == model.num_parameters(tp)
    assert shape.padded_vocab_size(tp) == model.padded_vocab_size(tp)


def test_the_models_are_those_of_the_harness():
    assert set(model_names()) == set(HARNESS_MODELS)
    sizes = [load_model(name)[0].num_parameters() for name in model_names()]
    assert sizes == sorted(sizes)


def test_the_7b_is_what_the_authors_logs_count():
    assert load_model("7B")[0].num_parameters() == 5_948_837_888


# As DeepSpeed printed them in the authors' runs.
def test_subgroups_are_those_that_deepspeed_printed():
    got = of("8.3B", dp=4, subgroup_numel=100_000_000).subgroups
    assert len(got) == 22
    assert got[:4] == (102338304, 111875328, 100471296, 114235392)
    assert got[-1] == 38634240
    got = of("7B", dp=1, subgroup_numel=10_000_000).subgroups
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
        ({"dp": 0}, "dp = 0"),
        ({"dp": 2.0}, "dp = 2.0"),
        ({"stride": 0}, "stride = 0"),
        ({"micro_batch_size": -1}, "micro_batch_size = -1"),
        ({"tile_numel": 17}, "tile_numel = 17"),
        ({"tp": 3}, "tp = 3: the model's heads 32"),
        ({"policy": "dinamic"}, "did you mean 'dynamic'"),
        ({"dtype": "fp8"}, "dtype = 'fp8'"),
        ({"policy": "ratio"}, "needs offload_ratio below 1"),
        ({"software": SOFTWARE["paper"], "stride": 1}, "stride = 1"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(fields, words):
    with pytest.raises(WorkloadError, match=words):
        of(**fields)


def test_an_unknown_model_names_the_nearest():
    with pytest.raises(ModelError, match=r"unknown model '8B': did you mean '.+'"):
        load_model("8B")


def test_a_model_is_read_from_any_file(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('name = "mine"\nhidden = 64\nffn = 128\nlayers = 2\nheads = 4\nkv_heads = 2\n')
    assert load_model(path)[0].layers == 2
    assert load_model(path)[1] == {}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden": 0}, "hidden = 0"),
        ({"hidden": 65}, "multiple of heads"),
        ({"width": 1}, "unknown key 'width'"),
    ],
)
def test_a_wrong_shape_is_refused(change, words):
    table = {"name": "m", "hidden": 64, "ffn": 128, "layers": 2, "heads": 4, "kv_heads": 2}
    with pytest.raises(ModelError, match=words):
        model_from_table(table | change)
    del table["ffn"]
    with pytest.raises(ModelError, match="ffn is missing"):
        model_from_table(table)
