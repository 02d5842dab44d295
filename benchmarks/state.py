"""What a DeepSpeed engine has trained, piece by piece, to be compared bit by bit."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch import Tensor

MOMENTS = ("exp_avg", "exp_avg_sq")


def weights(engine: Any) -> Iterator[Tensor]:  # noqa: ANN401 - DeepSpeed's
    """16-bit partitions of this rank, parameter by parameter, without padding."""
    # An update may be in flight; who asks for the master weights waits for it.
    assert engine.optimizer.fp32_partitioned_groups_flat is not None
    for group in engine.optimizer.fp16_groups:
        for param in group:
            yield param.ds_tensor.data[: _real_numel(param)]


def masters(engine: Any) -> Iterator[Tensor]:  # noqa: ANN401
    """Master weights, likewise."""
    optimizer = engine.optimizer
    flats = optimizer.fp32_partitioned_groups_flat
    for group, flat in zip(optimizer.fp16_groups, flats, strict=True):
        yield from _pieces(flat.data, group)


def moments(engine: Any) -> Iterator[Tensor]:  # noqa: ANN401
    """Both moments, likewise; nothing for a subgroup whose moments another process holds."""
    optimizer = engine.optimizer
    backup = getattr(optimizer, "backup_optimizer", None)
    owners = [owner for owner in (optimizer.optimizer, backup) if owner is not None]
    flats = optimizer.fp32_partitioned_groups_flat
    for group, flat in zip(optimizer.fp16_groups, flats, strict=True):
        for owner in owners:
            state = owner.state.get(flat, {})
            for key in MOMENTS:
                if key in state:
                    yield from _pieces(state[key], group)


def digests(engine: Any) -> dict[str, str | None]:  # noqa: ANN401
    """sha256 of weights, master weights and moments; None where there is nothing to hash."""
    found = {"weights": weights(engine), "masters": masters(engine), "moments": moments(engine)}
    return {name: digest(list(tensors)) for name, tensors in found.items()}


def digest(tensors: list[Tensor]) -> str | None:
    """sha256 of the tensors' own sha256, hashed side by side; None for none."""
    if not tensors:
        return None
    with ThreadPoolExecutor() as pool:
        joined = "\n".join(pool.map(_sha256, tensors))
    return hashlib.sha256(joined.encode()).hexdigest()


def _sha256(tensor: Tensor) -> str:
    import torch

    whole = tensor.detach().to("cpu").contiguous()
    return hashlib.sha256(whole.view(torch.uint8).numpy().data).hexdigest()


def _pieces(flat: Tensor, params: list[Any]) -> Iterator[Tensor]:
    start = 0
    for param in params:
        yield flat[start : start + _real_numel(param)]
        start += param.partition_numel()


def _real_numel(param: Any) -> int:  # noqa: ANN401 - a parameter as ZeRO-3 extends it
    """Elements of a parameter's partition that are not padding, which holds anything."""
    import torch.distributed as dist

    size = int(param.partition_numel())
    rank = dist.get_rank(group=param.ds_process_group)
    return max(0, min(size, int(param.ds_numel) - size * rank))
