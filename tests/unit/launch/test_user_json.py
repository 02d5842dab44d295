"""A DeepSpeed JSON of the user's own: what is laid over, and what is refused before launch."""

import json

import in_process
import pytest

from configs.errors import ConfigError
from configs.study import load_study
from ds_config.release import NoAnswerError
from launch import run
from launch.ds_json import deepspeed_config
from launch.trainers.own import OwnTrainer
from launch.trainers.user_json import read_user_json, with_user_json

STUDY = load_study("zero-ladder")
POINT = STUDY.make_point(
    {"model": "tiny", "engine": "stage-2", "dp": 2, "micro_batch_size": 2, "global_batch_size": 8}
)


ASKED = []


def ask(made):
    ASKED.append(made)
    return in_process.ask(made)


@pytest.fixture(autouse=True)
def quick_deepspeed(monkeypatch):
    """DeepSpeed, which takes seconds to ask in a process of its own, is asked in this one."""
    ASKED.clear()
    monkeypatch.setattr("launch.trainers.user_json.ask", ask)
    monkeypatch.setattr("launch.trainers.user_json._ANSWERS", {})


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


KEYS = {
    "a nested key": (
        {"zero_optimization": {"overlap_com": True}},
        "zero_optimization.overlap_com: no key of DeepSpeed",
        "did you mean overlap_comm?",
    ),
    "a number as text": (
        {"zero_optimization": {"reduce_bucket_size": "5e8"}},
        "reduce_bucket_size: = '5e8'",
        "give a valid integer",
    ),
    "another scheduler": (
        {"scheduler": {"type": "WarmupLr", "params": {}}},
        "scheduler.type: = 'WarmupLr' is no scheduler of this DeepSpeed",
        "did you mean WarmupLR?",
    ),
}


@pytest.mark.parametrize(("table", "text", "remedy"), KEYS.values(), ids=KEYS)
def test_what_deepspeed_would_refuse_or_read_over_is_refused(given, table, text, remedy):
    [reason] = given(table).refuse(POINT)
    assert reason.startswith(str(given(table).user_json))
    assert text in reason
    assert remedy in reason


def test_all_that_is_wrong_is_named_at_once(given):
    [reason] = given({"zero_optimization": {"stag": 2}, "steps_per_prit": 1}).refuse(POINT)
    assert "steps_per_prit" in reason
    assert "zero_optimization.stag" in reason


def test_what_a_study_writes_is_not_blamed_on_the_file(given):
    path = given({"steps_per_print": 7}).user_json
    config = deepspeed_config(POINT) | {"of_the_study": 1}
    assert with_user_json(config, read_user_json(path), POINT, path)["of_the_study"] == 1


def test_a_dry_run_refuses_what_the_run_would_fail_on(given):
    path = given({"fp16": {"loss_scal": 0}}).user_json
    words = ["tiny", "--study", "zero-ladder", "--deepspeed-config", str(path), "--dry-run"]
    with pytest.raises(ConfigError, match=r"fp16\.loss_scal: .*raises an error; did you mean"):
        run.main(words)


def test_deepspeed_is_asked_once_a_file_about_what_runs(given):
    trainer = given({"zero_optimization": {"overlap_comm": False}})
    made = [trainer.ds_config(POINT) for _ in range(3)]
    assert made[:1] == ASKED


def test_a_deepspeed_that_does_not_answer_stops_nothing(given, monkeypatch, capsys):
    def silent(made):
        raise NoAnswerError("cannot be imported")

    monkeypatch.setattr("launch.trainers.user_json.ask", silent)
    assert given({"steps_per_print": 7}).refuse(POINT) == []
    assert capsys.readouterr().err.endswith("its keys are not checked: cannot be imported\n")
