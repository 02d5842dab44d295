"""Keys that runs of earlier versions have on disk, and what makes another run of a point."""

import pytest

from configs.schema import read_toml
from configs.study import default_study, make_point, study_from
from launch.records.identity import settings_key

KEYS = [
    ({"model": "tiny"}, "9859dd7c1b7628e9"),
    ({"model": "tiny", "engine": "a"}, "69406944883a78a1"),
    ({"model": "tiny", "engine": "h", "stride": 2}, "0aab7670e1b4bf13"),
    ({"model": "7B", "engine": "h", "stride": 5, "dp": 2}, "0760f77731e54c5d"),
    ({"model": "20B", "offload_ratio": 0.8, "hog_share": 0.2}, "ae650625aee0c692"),
    ({"model": "tiny", "subgroup_numel": 1000, "accumulation": 4, "engine": "a"},
     "5cf2e5ca93d10f86"),
]  # fmt: skip


@pytest.mark.parametrize(("table", "key"), KEYS)
def test_points_of_before_studies_keep_their_keys(table, key):
    assert settings_key(make_point(table)) == key
    assert settings_key(make_point({**table, "name": "mine"})) == key


def test_a_field_that_came_later_makes_another_point_where_it_is_set():
    table = {"model": "tiny", "engine": "a"}
    keys = {settings_key(make_point({**table, "just_in_time": on})) for on in (False, True)}
    assert len(keys) == 2


def test_another_row_is_another_point():
    table = default_study().model_dump(mode="json", exclude_unset=True)
    model = default_study().load_model("tiny")[0].model_dump()

    def key(**row):
        engines = {**table["engines"], "dynamic": {**table["engines"]["dynamic"], **row}}
        study = study_from({**table, "name": "own", "engines": engines}, "here")
        return settings_key(study.make_point({"model": model, "engine": "dynamic"}))

    assert key() == key(title="other words") != key(ds_config={"x": 1})
    assert key() != key(environment={"OMP_WAIT_POLICY": "active"})


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("tiny", "9859dd7c1b7628e9"),
        ("7B-hybrid", "a6f5847b3ceb03b4"),
        ("tiny-async-gradients", "69406944883a78a1"),
    ],
)
def test_runs_of_before_the_later_fields_still_count(name, key):
    assert settings_key(make_point(read_toml(default_study().files("points")[name]))) == key


@pytest.mark.parametrize(
    "fields",
    [
        {"dtype": "fp16"},
        {"pp": 2},
        {"link_mbit": 20},
        {"zero_stage": 2},
        {"offload_optimizer": "none"},
        {"offload_param": "cpu"},
        {"eval_interval": 5},
        {"eval_iterations": 5},
        {"save_interval": 5},
        {"seed": 5},
    ],
    ids=str,
)
def test_a_field_of_another_value_is_another_point(fields):
    assert settings_key(make_point({"model": "tiny", **fields})) != settings_key(
        make_point({"model": "tiny"})
    )


def test_another_architecture_is_another_point():
    model = default_study().load_model("tiny")[0].model_dump()
    keys = [
        settings_key(make_point({"model": {**model, "architecture": name}}))
        for name in ("llama", "gpt2")
    ]
    assert keys[0] != keys[1]
    del model["architecture"]
    assert settings_key(make_point({"model": model})) == keys[0]
