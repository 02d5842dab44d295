"""What a DeepSpeed engine has trained, by kind, to be compared bit by bit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def tensors_by_kind(engine: Any) -> dict[str, list[Tensor]]:  # noqa: ANN401 - DeepSpeed's
    """This rank's ``weights``, ``masters`` and ``moments``, piece by piece, without padding."""
    from deep_optimizer_states.state_reader import read_state

    subgroups, kinds = read_state(engine), ("weights", "masters", "moments")
    return {kind: [t for group in subgroups for t in getattr(group, kind)] for kind in kinds}
