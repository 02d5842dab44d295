"""Configurations as guides and projects publish them: DeepSpeed's own loader agrees."""

import json
from pathlib import Path

import pytest
from deepspeed.runtime.config import DeepSpeedConfig
from in_process import ask, explain_or_advise

from ds_config.document import read_config, write_beside
from ds_config.explain import explain, fixed
from ds_config.release import without_auto

PUBLISHED = Path(__file__).resolve().parents[3] / ".." / "shared" / "data" / "ds-configs"
ALL_ZERO_KEYS = """{
  "train_batch_size": "auto",
  "train_micro_batch_size_per_gpu": "auto",
  "gradient_accumulation_steps": "auto",
  "zero_optimization": {
    "stage": 3,              // 0 to 3
    "allgather_partitions": true,
    "allgather_bucket_size": 5e8,
    "overlap_comm": false,
    "reduce_scatter": true,
    "reduce_bucket_size": "auto",
    "contiguous_gradients": true,
    "offload_param": {"device": "cpu", "pin_memory": true},
    "offload_optimizer": {"device": "cpu", "pin_memory": true},
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
    "sub_group_size": 1e9,
    "elastic_checkpoint": false,
    "stage3_gather_16bit_weights_on_model_save": true,
    "ignore_unused_parameters": true,
    "round_robin_gradients": false,
  },
}"""
GUIDES = {
    "all keys of ZeRO": (ALL_ZERO_KEYS, True),
    "fp16 in the wrong block": (
        """{"train_batch_size": 16, "steps_per_print": 10,
        "zero_optimization": {"stage": 2, "all_reduce_bucket_size": 5e8,
            "fp16": {"enabled": true, "loss_scale": 0, "initial_scale_power": 16}}}""",
        False,
    ),
    "older names": (
        """{"train_batch_size": 8, "fp16": {"enabled": true},
        "zero_optimization": {"stage": 2, "cpu_offload": true, "allgather_bucket_size": 2e8}}""",
        True,
    ),
    "removed blocks": (
        """{"train_batch_size": 8, "elasticity": {"enabled": true, "max_train_batch_size": 2000,
            "micro_batch_sizes": [2, 4]}, "amp": {"enabled": false},
        "sparse_attention": {"mode": "fixed"}, "bf16": {"enabled": true},
        "zero_optimization": {"stage": 3, "mics_shard_size": 4}}""",
        False,
    ),
}  # fmt: skip
FILES = sorted(PUBLISHED.glob("*.json")) if PUBLISHED.is_dir() else []


def told(table):
    return explain(table, ask(table))


def takes(table):
    try:
        DeepSpeedConfig(without_auto(table))
    except Exception:  # noqa: BLE001 - whatever it raises
        return False
    return True


@pytest.fixture(params=[*GUIDES, *(path.name for path in FILES)])
def file(request, tmp_path):
    path = tmp_path / "config.json"
    name = request.param
    path.write_text(GUIDES[name][0] if name in GUIDES else (PUBLISHED / name).read_text())
    return path


@pytest.mark.parametrize(("text", "is_good"), GUIDES.values(), ids=GUIDES)
def test_a_guides_example_is_judged(tmp_path, text, is_good):
    path = tmp_path / "config.json"
    path.write_text(text)
    assert told(read_config(str(path)).table).is_accepted == is_good


def test_the_loader_agrees_and_no_key_of_deepspeed_is_unknown(file):
    table = read_config(str(file)).table
    found = told(table)
    assert found.is_accepted == takes(table)
    assert all(line.meaning for line in found.keys)
    if takes(table):
        assert not found.unknown


def test_a_corrected_copy_loads(file):
    table = read_config(str(file)).table
    copy = write_beside(file, fixed(table, told(table))[0])
    table = json.loads(copy.read_text())
    assert takes(table)
    assert told(table).is_accepted


def test_a_copy_of_a_sound_file_is_written_where_it_is_no_strict_json(tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text(ALL_ZERO_KEYS)
    assert explain_or_advise(["explain", path, "--fix"]) == 0
    assert json.loads((tmp_path / "config.fixed.json").read_text())["zero_optimization"]
    assert "strict JSON" in capsys.readouterr().err
    (tmp_path / "strict.json").write_text('{"train_batch_size": 1}')
    assert explain_or_advise(["explain", tmp_path / "strict.json", "--fix"]) == 0
    assert "nothing to mend" in capsys.readouterr().err


def test_a_subgroup_for_every_tensor_is_warned_of():
    zero = {"stage": 3, "sub_group_size": 0}
    table = {"train_batch_size": 1, "zero_optimization": zero}
    keys = {note.key for note in told(table).warnings}
    assert "zero_optimization.sub_group_size" in keys
    zero["sub_group_size"] = 1e9
    keys = {note.key for note in told(table).warnings}
    assert "zero_optimization.sub_group_size" not in keys
