"""Fingerprints of the trained state, to compare two runs without keeping their weights."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

MAX_LOCAL_NUMEL = 300_000_000
"""Above this many parameters a rank, hashing would take longer than the run is worth."""


def state_digests(engine: Any) -> tuple[str | None, str | None]:  # noqa: ANN401 - DeepSpeed's
    """Fingerprint the 16-bit weights, and the master weights with both moments, of all ranks.

    Every rank hashes what it holds: under ZeRO-3 its partitions without their padding, which is
    uninitialised memory. The ranks' hashes are then hashed in rank order. Every rank must call it.

    Returns:
        Hex digests of the weights and of the optimizer state; both None when any rank holds
        ``MAX_LOCAL_NUMEL`` elements or more.
    """
    mine: tuple[str, str] | None = None
    if engine.zero_optimization_stage() < 3:
        weights, state = list(engine.module.parameters()), list(_whole_state(engine.optimizer))
        if sum(weight.numel() for weight in weights) < MAX_LOCAL_NUMEL:
            mine = (_sha256(weights), _sha256(state))
    elif _num_local(engine.optimizer) < MAX_LOCAL_NUMEL:
        mine = (_sha256(_weights(engine.optimizer)), _sha256(_optimizer_state(engine.optimizer)))
    everyone: list[tuple[str, str] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    if any(digests is None for digests in everyone):
        return None, None
    all_weights, all_states = zip(*(digests for digests in everyone if digests), strict=True)
    return _join(all_weights), _join(all_states)


def _whole_state(optimizer: Any) -> Iterator[Tensor]:  # noqa: ANN401
    """What the optimizer below DeepSpeed's updates: master weights and moments, with zeros behind.

    DeepSpeed's wrapper of a stage below 3 hands flat tensors down; without one (a model in fp32)
    the parameters themselves are updated.
    """
    inner = getattr(optimizer, "optimizer", optimizer)
    for group in inner.param_groups:
        for param in group["params"]:
            yield param
            yield from (inner.state[param][name] for name in ("exp_avg", "exp_avg_sq"))


def _num_local(optimizer: Any) -> int:  # noqa: ANN401
    return sum(flat.numel() for flat in optimizer.fp32_partitioned_groups_flat)


def _weights(optimizer: Any) -> Iterator[Tensor]:  # noqa: ANN401
    """This rank's 16-bit partitions, parameter by parameter."""
    for group in optimizer.fp16_groups:
        for param in group:
            yield param.ds_tensor.data[: _real_numel(param)]


def _optimizer_state(optimizer: Any) -> Iterator[Tensor]:  # noqa: ANN401
    """This rank's master weights and moments, subgroup by subgroup, parameter by parameter."""
    for group, flat in zip(
        optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True
    ):
        state = _state_of(optimizer, flat)
        for tensor in (flat, state.get("exp_avg"), state.get("exp_avg_sq")):
            if tensor is not None:
                yield from _without_padding(tensor, group)


def _state_of(optimizer: Any, flat: Tensor) -> dict[str, Tensor]:  # noqa: ANN401
    """Adam's state of one subgroup; with an offload ratio below 1, stock keeps some elsewhere."""
    backup = getattr(optimizer, "backup_optimizer", None)
    for owner in (optimizer.optimizer, backup):
        if owner is not None and flat in owner.state:
            return dict(owner.state[flat])
    return {}


def _without_padding(flat: Tensor, params: list[Any]) -> Iterator[Tensor]:
    start = 0
    for param in params:
        yield flat[start : start + _real_numel(param)]
        start += param.partition_numel()


def _real_numel(param: Any) -> int:  # noqa: ANN401 - a parameter as ZeRO-3 extends it
    rank = dist.get_rank(group=param.ds_process_group)
    return real_numel(param.ds_numel, param.partition_numel(), rank)


def real_numel(numel: int, partition_numel: int, dp_rank: int) -> int:
    """Elements of a rank's partition that belong to the parameter, not to the padding."""
    return max(0, min(partition_numel, numel - partition_numel * dp_rank))


def _sha256(tensors: Iterable[Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        whole = tensor.detach().to("cpu").contiguous()
        digest.update(whole.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _join(digests: tuple[str, ...]) -> str:
    return hashlib.sha256("\n".join(digests).encode()).hexdigest()
