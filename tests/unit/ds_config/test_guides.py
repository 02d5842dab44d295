"""Configurations as guides and projects publish them: DeepSpeed's own loader agrees."""

import json
from pathlib import Path

import pytest
from in_process import ask, explain_or_advise, refuses, told

from ds_config.document import read_config
from ds_config.mend import fixed

PUBLISHED = Path(__file__).resolve().parents[3] / ".." / "shared" / "data" / "ds-configs"
GUIDES = {
    "all keys of ZeRO": """{
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
}""",
}
"""An example as guides print it, which is sound."""
FILES = sorted(PUBLISHED.glob("*.json")) if PUBLISHED.is_dir() else []


@pytest.fixture(params=[*GUIDES, *(path.name for path in FILES)])
def file(request, tmp_path):
    path = tmp_path / "config.json"
    name = request.param
    path.write_text(GUIDES[name] if name in GUIDES else (PUBLISHED / name).read_text())
    return path


def test_the_loader_agrees_and_no_key_of_deepspeed_is_unknown(file):
    table = read_config(file).table
    found = told(table)
    assert found.is_accepted != refuses(table)
    assert all(line.meaning for line in found.keys)
    if not refuses(table):
        assert not found.unknown


def test_a_corrected_copy_loads(file):
    table = read_config(file).table
    table, _ = fixed(table, ask(table))
    assert not refuses(table)
    assert told(table).is_accepted


def test_a_sound_file_that_is_no_strict_json_is_written_so(tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text(GUIDES["all keys of ZeRO"])
    assert explain_or_advise(["explain", path, "--fix"]) == 0
    assert json.loads((tmp_path / "config.fixed.json").read_text())["zero_optimization"]
    assert "strict JSON" in capsys.readouterr().err


@pytest.mark.parametrize(("numel", "is_warned"), [(0, True), (1e9, False)])
def test_a_subgroup_for_every_tensor_is_warned_of(numel, is_warned):
    zero = {"stage": 3, "sub_group_size": numel}
    found = told({"train_batch_size": 1, "zero_optimization": zero})
    key = "zero_optimization.sub_group_size"
    assert (key in {note.key for note in found.warnings}) == is_warned
