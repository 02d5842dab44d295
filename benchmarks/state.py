"""What a DeepSpeed engine has trained, by kind, to be compared bit by bit."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def tensors_by_kind(engine: Any) -> dict[str, list[Tensor]]:  # noqa: ANN401 - DeepSpeed's
    """This rank's ``weights``, ``masters`` and ``moments``, piece by piece, without padding."""
    from deep_optimizer_states.state_reader import read_state

    subgroups, kinds = read_state(engine), ("weights", "masters", "moments")
    return {kind: [t for group in subgroups for t in getattr(group, kind)] for kind in kinds}


def digests(engine: Any) -> dict[str, str | None]:  # noqa: ANN401
    """sha256 of each kind's own sha256, hashed side by side; None where there is nothing."""
    return {kind: _digest(tensors) for kind, tensors in tensors_by_kind(engine).items()}


def _digest(tensors: list[Tensor]) -> str | None:
    from deep_optimizer_states.state_reader import digest

    if not tensors:
        return None
    with ThreadPoolExecutor() as pool:
        joined = "\n".join(pool.map(lambda tensor: digest([tensor]), tensors))
    return hashlib.sha256(joined.encode()).hexdigest()
