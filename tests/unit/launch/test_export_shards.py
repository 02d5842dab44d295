"""What an export of DeepSpeed's checkpoints refuses; real ones are another test's."""

from pathlib import Path

import pytest

from configs.errors import ConfigError
from launch.export.weights import merge
from launch.train_loop.checkpoint import Checkpoint


def test_tensor_parallel_parts_are_refused(monkeypatch):
    monkeypatch.setattr(Checkpoint, "damage", lambda _checkpoint: "")
    point = {"tp": 2, "dp": 1, "zero_stage": 2, "dtype": "bf16"}
    files = {"mp_rank_00_model_states.pt": 1}
    with pytest.raises(ConfigError, match="tp = 2: a checkpoint of DeepSpeed is joined over"):
        merge(Checkpoint(Path("/run/checkpoints/iteration-000002"), 2, point, None, files))
