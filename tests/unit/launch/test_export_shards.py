"""How parts of DeepSpeed's ranks are joined for an export; real checkpoints are another test's."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from configs.errors import ConfigError
from launch.export.weights import merge
from launch.trainer.checkpoint import Checkpoint

FLAT = torch.arange(6.0)


def checkpoint(**point):
    point = {"tp": 1, "dp": 2, "zero_stage": 2, "dtype": "bf16", **point}
    files = {"mp_rank_00_model_states.pt": 1, "zero_pp_rank_1_mp_rank_00_optim_states.pt": 1}
    return Checkpoint(Path("/run/checkpoints/iteration-000002"), 2, point, None, files)


@pytest.fixture
def asked(monkeypatch):
    """What DeepSpeed's own joining was asked for."""
    asked = []

    def join(*given):
        asked.append(given)
        return {"first": FLAT[:4].view(2, 2), "last": FLAT[4:], "tied": None}

    joining = SimpleNamespace(get_fp32_state_dict_from_zero_checkpoint=join)
    monkeypatch.setitem(sys.modules, "deepspeed.utils.zero_to_fp32", joining)
    monkeypatch.setattr(Checkpoint, "damage", lambda _checkpoint: "")
    return asked


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_parts_of_several_ranks_are_joined_by_deepspeed(asked, stage, dtype):
    found = merge(checkpoint(zero_stage=stage, dtype=dtype))
    assert asked == [("/run/checkpoints", "iteration-000002")]
    assert list(found) == ["first", "last"]
    for weight, expected in zip(found.values(), (FLAT[:4].view(2, 2), FLAT[4:]), strict=True):
        assert weight.dtype == (torch.float32 if dtype == "fp32" else torch.bfloat16)
        assert torch.equal(weight.float(), expected)
        # A part of a storage cannot be written by safetensors.
        assert weight.untyped_storage().nbytes() == weight.nbytes


def test_tensor_parallel_parts_are_refused(asked):
    with pytest.raises(ConfigError, match="tp = 2: a checkpoint of DeepSpeed is joined over"):
        merge(checkpoint(tp=2))
    assert asked == []
