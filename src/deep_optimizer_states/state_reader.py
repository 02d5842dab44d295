"""Read what a ZeRO engine has trained, stock's or ours, to compare or fingerprint it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class SubgroupState:
    """This rank's part of one subgroup: views, each 1-D, one a parameter, without padding.

    Attributes:
        weights: 16-bit weights.
        masters: Master weights.
        moments: The first moment of every parameter, then the second; empty where another process
            holds them, and before stock's first step.
    """

    weights: list[Tensor]
    masters: list[Tensor]
    moments: list[Tensor]


def read_state(engine: Any) -> list[SubgroupState]:
    """Read state by subgroup, in views that the next update changes; one in flight is awaited.

    Args:
        engine: A DeepSpeed engine. Below stage 3 everything counts as one subgroup, and masters and
            moments are the optimizer's own flat tensors.
    """
    optimizer = engine.optimizer
    if engine.zero_optimization_stage() < 3:
        return [_whole_state(engine)]
    masters = optimizer.fp32_partitioned_groups_flat  # an update in flight is waited for here
    return [
        SubgroupState(
            [param.ds_tensor.data[: real_numel(param)] for param in params],
            _pieces(params, [master.data]),
            _pieces(params, _moments_of(optimizer, master)),
        )
        for params, master in zip(optimizer.fp16_groups, masters, strict=True)
    ]


def _whole_state(engine: Any) -> SubgroupState:
    # DeepSpeed's wrapper of a stage below 3 hands flat tensors down; without one (a model in fp32)
    # the parameters themselves are updated.
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    state = getattr(engine.optimizer, "state", inner.state)  # an update in flight is waited for
    masters = [param for group in inner.param_groups for param in group["params"]]
    # There are none before the first step, which an fp16 run that skips every update never takes.
    states = [state.get(param, {}) for param in masters]
    moments = [state[key] for key in MOMENTS for state in states if key in state]
    return SubgroupState(list(engine.module.parameters()), masters, moments)


def real_numel(param: Any) -> int:
    """Count the elements of this rank's slice that are not padding, which holds anything."""
    numel, rank = int(param.partition_numel()), dist.get_rank(group=param.ds_process_group)
    return max(0, min(numel, int(param.ds_numel) - numel * rank))


def digest(tensors: Iterable[Tensor]) -> str:
    """Return sha256 of the bytes of tensors, one after the other."""
    found = hashlib.sha256()
    for tensor in tensors:
        whole = tensor.detach().to("cpu").contiguous()
        found.update(whole.view(torch.uint8).numpy().data)
    return found.hexdigest()


def _moments_of(optimizer: Any, master: Tensor) -> Iterator[Tensor]:
    # With an offload ratio below 1, stock keeps some of them in an optimizer of its own.
    for owner in (optimizer.optimizer, getattr(optimizer, "backup_optimizer", None)):
        state = {} if owner is None else owner.state.get(master, {})
        yield from (state[key] for key in MOMENTS if key in state)


def _pieces(params: list[Any], flats: Iterable[Tensor]) -> list[Tensor]:
    found = []
    for flat in flats:
        start = 0
        for param in params:
            found.append(flat[start : start + real_numel(param)])
            start += param.partition_numel()
    return found
