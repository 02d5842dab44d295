"""Joins what the ranks of a run saved into whole weights, whatever TP, PP and DP they had."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from configs.errors import ConfigError
from launch.trainer.checkpoint import Checkpoint
from launch.trainer.model import DTYPES
from launch.trainer.pipeline_adapter import file_name, read_shard

_DEEPSPEED = "mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"
"""What every checkpoint of DeepSpeed has one of, by whether the stage is below 3."""


def merge(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """The whole model's weights.

    Files of the pipeline trainer are mapped, not read whole, so that the memory needed is that of
    the weights in the run's type. Those of DeepSpeed need the weights in fp32 beside.

    Args:
        checkpoint: of the pipeline trainer, or one that DeepSpeed saved.

    Returns:
        Weights in the run's type, by megatron-core's names for a model on one rank.

    Raises:
        ConfigError: it is damaged, lacks a rank's file, or holds two copies of a weight that are
            not equal; or it is of DeepSpeed with tensor parallelism.
    """
    if damage := checkpoint.damage():
        raise ConfigError(f"the checkpoint is damaged: {damage}; take an earlier one")
    if any(name in checkpoint.files for name in _DEEPSPEED):
        return _of_deepspeed(checkpoint)
    dtype = DTYPES[checkpoint.point["dtype"]]
    shards, axes = _collect(checkpoint)
    num_shards = checkpoint.point["tp"]
    whole = {}
    for name, parts in shards.items():
        axis = axes[name]
        if axis is not None and len(parts) != num_shards:
            raise ConfigError(
                f"{checkpoint.path}: {name} has {len(parts)} shards, and tp = {num_shards}; the "
                "checkpoint is not whole, take another one"
            )
        ordered = [parts[index].to(dtype) for index in sorted(parts)]
        whole[name] = ordered[0] if axis is None else torch.cat(ordered, dim=axis)
    return whole


def _collect(
    checkpoint: Checkpoint,
) -> tuple[dict[str, dict[int, Tensor]], dict[str, int | None]]:
    """Master weights by name and tensor-parallel rank, and the axis along which each is split.

    Replicas, tied embeddings and weights that are not split are in several files: all of these
    copies have to have the same bits.
    """
    shards: dict[str, dict[int, Tensor]] = {}
    axes: dict[str, int | None] = {}
    for path in _files(checkpoint):
        state = read_shard(path, mmap=True)
        for name, weight in state["rank"]["optimizer"]["masters"].items():
            axis = axes.setdefault(name, state["split_along"][name])
            index = 0 if axis is None else state["place"]["tp"]
            known = shards.setdefault(name, {}).setdefault(index, weight)
            # As whole numbers, since a NaN equals nothing.
            if not torch.equal(known.view(torch.int32), weight.view(torch.int32)):
                raise ConfigError(
                    f"{path}: {name} differs from the copy that another rank saved, and all "
                    "copies must be equal; take another checkpoint"
                )
    return shards, axes


def _files(checkpoint: Checkpoint) -> list[Path]:
    num_ranks = math.prod(checkpoint.point[name] for name in ("tp", "pp", "dp"))
    names = [file_name(rank) for rank in range(num_ranks)]
    missing = [name for name in names if name not in checkpoint.files]
    if missing:
        raise ConfigError(
            f"{checkpoint.path}: {missing[0]} is missing, of {num_ranks} ranks' files; give a "
            "checkpoint of --trainer megatron-pipeline or of DeepSpeed"
        )
    return [checkpoint.path / name for name in names]


def _of_deepspeed(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """DeepSpeed joins its own parts of optimizer states; below stage 1 there are none."""
    point: dict[str, Any] = checkpoint.point
    if point["tp"] > 1:
        raise ConfigError(
            f"tp = {point['tp']}: a checkpoint of DeepSpeed is joined over replicas alone; give a "
            "run with tp = 1, or one of --trainer megatron-pipeline"
        )
    if point["zero_stage"] == 0:
        path = checkpoint.path / _DEEPSPEED[0]
        found = torch.load(path, map_location="cpu", weights_only=False)["module"]
    else:
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        folder = checkpoint.path
        found = get_fp32_state_dict_from_zero_checkpoint(str(folder.parent), folder.name)
    dtype = DTYPES[point["dtype"]]
    # Copied even if the type stays: at stages 1 and 2 each weight is a view of one flat tensor, and
    # safetensors writes none that fills only a part of its storage.
    return {
        name: weight.to(dtype, copy=True) for name, weight in found.items() if weight is not None
    }
