"""How many messages are compressed and how large they are, from shapes alone; without torch."""

from __future__ import annotations

import math
from collections.abc import Sequence

BLOCK_NUMEL = 64
"""Elements that share a scale; a power of two, as a Hadamard rotation needs."""
SCALE_BYTES = 2
"""A scale is a bf16 number, which has fp32's range."""


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Return rows and columns of a tensor seen as a matrix: all dimensions but the last are rows.

    A message is (sequence, micro-batch, hidden); a vector is one row.
    """
    columns = shape[-1] if shape else 1
    return (math.prod(shape) // columns if columns else 0), columns


def pair_numel(rows: int, columns: int, rank: int) -> int:
    """Return the elements of P, (rows, r), and Q, (columns, r); r is at most full rank."""
    return min(rank, rows, columns) * (rows + columns)


def saves(shape: Sequence[int], rank: int) -> bool:
    """Return whether P and Q have fewer elements than the tensor.

    Where they have not, the tensor itself is sent, which is both smaller and exact.
    """
    rows, columns = matrix_shape(shape)
    return pair_numel(rows, columns, rank) < rows * columns


def num_epilogue_messages(receiver: int, num_stages: int, num_micro_batches: int) -> int:
    """Return the messages of an iteration that a link carries in the epilogue.

    Args:
        receiver: the stage that receives activation gradients on the link, from 0.
        num_stages: of the pipeline.
        num_micro_batches: of an iteration.
    """
    return min(num_micro_batches, num_stages - receiver - 1)


def ring_bytes(nbytes: int, num_ranks: int) -> int:
    """Return what each rank sends when a ring of ranks all-reduces tensors of ``nbytes``."""
    return 2 * (num_ranks - 1) * nbytes // num_ranks


def packed_bytes(numel: int, bits: int) -> int:
    """Return the bytes of elements of ``bits`` bits, scales and the filling of blocks included."""
    return -(-numel // BLOCK_NUMEL) * (BLOCK_NUMEL * bits // 8 + SCALE_BYTES)
