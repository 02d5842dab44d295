import pytest

from configs.schema import CONFIGS_DIR, load_point, make_point
from launch.records.identity import settings_key


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("tiny", "9859dd7c1b7628e9"),
        ("7B-hybrid", "a6f5847b3ceb03b4"),
        ("tiny-async-gradients", "69406944883a78a1"),
    ],
)
def test_runs_of_before_the_later_fields_still_count(name, key):
    assert settings_key(load_point(CONFIGS_DIR / "points" / f"{name}.toml")) == key


@pytest.mark.parametrize(
    "fields",
    [
        {"dtype": "fp16"},
        {"pp": 2},
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
    model = load_point(CONFIGS_DIR / "points" / "tiny.toml").model.model_dump()
    keys = [
        settings_key(make_point({"model": {**model, "architecture": name}}))
        for name in ("llama", "gpt2")
    ]
    assert keys[0] != keys[1]
    del model["architecture"]
    assert settings_key(make_point({"model": model})) == keys[0]
