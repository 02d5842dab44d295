"""Memory that compression keeps between its calls: queries and errors.

What a call allocates besides, such as P and Q, their product or a stack of equal matrices, is free
again when it ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from optimus_cc import low_rank
from optimus_cc.settings import Settings
from optimus_cc.sizes import BITS

_FP32_BYTES = 4
"""Queries and errors are fp32, whatever the type of the messages."""


def low_rank_bytes(shape: torch.Size, rank: int, error_feedback: bool) -> int:
    """Bytes kept for one stream of messages, or for one gradient.

    Args:
        shape: of the message, such as (sequence, micro-batch, hidden), or of the gradient.
        rank: columns of P and Q.
        error_feedback: whether what was not sent is kept, which takes as much as an fp32 message.

    Returns:
        Query and error; 0 where P and Q would not be smaller, since that is sent whole.
    """
    if not low_rank.saves(shape, rank):
        return 0
    rows, columns = low_rank.matrix_shape(shape)
    query = columns * rank
    return _FP32_BYTES * (query + (rows * columns if error_feedback else 0))


def state_bytes(
    settings: Settings,
    stage: int,
    messages: Iterable[torch.Size],
    gradients: Iterable[torch.Size],
) -> int:
    """Bytes that a rank keeps once all is compressed that will be.

    Args:
        settings: which schemes, at which rank.
        stage: of the rank, from 0; the first one sends no activation gradients.
        messages: shape of an activation gradient, one for each stream; usually one.
        gradients: shapes of the parameters that are averaged over replicas, of which there are
            several; with FE the tied embedding is not one of them.

    Raises:
        ValueError: gradients are compressed in another way than by our PowerSGD.
    """
    feedback, total = settings.use_error_feedback, 0
    if settings.inter_grad_comp and stage > 0:
        rank = settings.inter_grad_comp_rank
        if settings.inter_grad_comp_method in BITS:
            total += sum(_FP32_BYTES * shape.numel() * feedback for shape in messages)
        else:
            total += sum(low_rank_bytes(shape, rank, feedback) for shape in messages)
    if settings.compresses_gradients_of(stage):
        if settings.grad_comp_method != "power-sgd":
            raise ValueError(
                f"grad_comp_method = {settings.grad_comp_method!r}: what it keeps is known of a "
                "run alone; give 'power-sgd'"
            )
        rank = settings.grad_comp_rank
        matrices = (shape for shape in gradients if len(shape) == 2)
        total += sum(low_rank_bytes(shape, rank, feedback) for shape in matrices)
    return total


def held_bytes(state: object) -> int:
    """Bytes of all tensors in what a ``state_dict()`` gave."""
    if isinstance(state, Tensor):
        return state.nbytes
    if isinstance(state, Mapping):
        return sum(map(held_bytes, state.values()))
    return 0
