"""A DeepSpeed JSON of the user's own: what is laid over, and what is refused before launch."""

import json

import pytest

from configs.errors import ConfigError
from configs.study import load_study
from launch import run
from launch.backends.own import OwnTrainer, read_user_json
from launch.ds_json import deepspeed_config

STUDY = load_study("zero-ladder")
POINT = STUDY.make_point(
    {"model": "tiny", "engine": "stage-2", "dp": 2, "micro_batch_size": 2, "global_batch_size": 8}
)


@pytest.fixture
def given(tmp_path):
    """``given(table)`` -> a trainer with that file."""

    def write(table):
        path = tmp_path / "ds.json"
        path.write_text(table if isinstance(table, str) else json.dumps(table))
        return OwnTrainer(user_json=path)

    return write


def test_what_it_says_is_laid_over_and_the_rest_stays(given):
    before = deepspeed_config(POINT)
    made = given({"zero_optimization": {"overlap_comm": False}}).ds_config(POINT)
    assert made["zero_optimization"] == {**before["zero_optimization"], "overlap_comm": False}
    assert {**made, "zero_optimization": None} == {**before, "zero_optimization": None}


def test_auto_leaves_a_value_to_the_point_and_what_agrees_with_it_may_be_said(given):
    table = {"train_batch_size": "auto", "zero_optimization": {"reduce_bucket_size": "auto"}}
    assert given(table).ds_config(POINT) == deepspeed_config(POINT)
    table = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": 2},
    }
    assert given(table).refuse(POINT) == []


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"deep_optimizer_states": {"enabled": True}}, "choose an engine of the study"),
        ("{", "not valid JSON"),
        ("[]", "not a JSON object"),
    ],
)
def test_a_wrong_file_is_refused_before_anything_starts(given, table, words):
    with pytest.raises(ConfigError, match=words):
        read_user_json(given(table).user_json)


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"train_batch_size": 16, "gradient_accumulation_steps": 4}, "train_batch_size = 16: "),
        ({"train_batch_size": "8"}, 'train_batch_size = "8": the run has global_batch_size = 8'),
        ({"gradient_accumulation_steps": 1.5}, "= 1.5: the run has accumulation = 2; leave the"),
        ({"zero_optimization": {"stage": 3}}, "stage = 3: the run has zero_stage = 2"),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
            "offload_optimizer.device = \"cpu\": the run has offload_optimizer = 'none'",
        ),
        ({"fp16": {"enabled": True}}, "fp16.enabled = true: the run has dtype = 'fp32'"),
        ({"gradient_clipping": 2.0}, "gradient_clipping = 2.0: the run has clip_grad = 1.0"),
    ],
)
def test_what_contradicts_the_point_or_itself_is_a_reason_not_to_start(given, table, words):
    [reason] = given(table).refuse(POINT)
    assert words in reason


def test_a_dry_run_refuses_what_contradicts_the_point(given):
    path = given({"fp16": {"enabled": True}}).user_json
    words = ["tiny", "--study", "zero-ladder", "--deepspeed-config", str(path), "--dry-run"]
    with pytest.raises(ConfigError, match=r"fp16\.enabled = true: the run has dtype"):
        run.main(words)
