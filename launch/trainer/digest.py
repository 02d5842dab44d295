"""Fingerprints of the trained state, to compare two runs without keeping their weights."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch.distributed as dist
from torch import Tensor

from deep_optimizer_states.cores import usable_cores
from deep_optimizer_states.state_reader import digest, read_state

MAX_NUMEL_PER_CORE = 300_000_000
"""Above this many parameters a core, hashing would take longer than the run is worth."""


def state_digests(engine: Any) -> tuple[str | None, str | None]:  # noqa: ANN401 - DeepSpeed's
    """Fingerprint the 16-bit weights, and the master weights with both moments, of all ranks.

    Every rank hashes what it holds: under ZeRO-3 its partitions without their padding, which is
    uninitialised memory. The ranks' hashes are then hashed in rank order. Every rank must call it.

    Returns:
        Hex digests of the weights and of the optimizer state; both None when any rank holds
        ``MAX_NUMEL_PER_CORE`` elements a core or more, the second where another process than the
        rank holds the moments.
    """
    subgroups = read_state(engine)
    weights = [tensor for subgroup in subgroups for tensor in subgroup.weights]
    state = [t for subgroup in subgroups for t in (*subgroup.masters, *subgroup.moments)]
    mine: tuple[str | None, str | None] = (None, None)
    if sum(tensor.numel() for tensor in weights) < MAX_NUMEL_PER_CORE * usable_cores():
        has_moments = all(subgroup.moments for subgroup in subgroups)
        mine = (_digest(weights), _digest(state) if has_moments else None)
    everyone: list[tuple[str | None, str | None]] = [mine] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    first, second = zip(*everyone, strict=True)
    return _join(first), _join(second)


def _digest(tensors: list[Tensor]) -> str | None:
    """Of each tensor's own digest, hashed side by side."""
    with ThreadPoolExecutor(usable_cores()) as pool:
        return _join(tuple(pool.map(lambda tensor: digest([tensor]), tensors)))


def _join(digests: tuple[str | None, ...]) -> str | None:
    """The digest of several; None where one is lacking."""
    found = [text for text in digests if text is not None]
    if len(found) < len(digests):
        return None
    return hashlib.sha256("\n".join(found).encode()).hexdigest()
