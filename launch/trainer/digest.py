"""Fingerprints of the trained state, to compare two runs without keeping their weights."""

from __future__ import annotations

import hashlib
from typing import Any

import torch.distributed as dist

from deep_optimizer_states.state_reader import digest, read_state

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
    subgroups = read_state(engine)
    weights = [tensor for subgroup in subgroups for tensor in subgroup.weights]
    state = [t for subgroup in subgroups for t in (*subgroup.masters, *subgroup.moments)]
    mine: tuple[str, str] | None = None
    if sum(tensor.numel() for tensor in weights) < MAX_LOCAL_NUMEL:
        mine = (digest(weights), digest(state))
    everyone: list[tuple[str, str] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    if any(digests is None for digests in everyone):
        return None, None
    first, second = zip(*(digests for digests in everyone if digests), strict=True)
    return _join(first), _join(second)


def _join(digests: tuple[str, ...]) -> str:
    return hashlib.sha256("\n".join(digests).encode()).hexdigest()
