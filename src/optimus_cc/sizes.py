"""How many messages are compressed and how large they are, from shapes alone; without torch."""

from __future__ import annotations

import math
from collections.abc import Sequence

BLOCK_NUMEL = 64
"""Elements that share a scale; a power of two, as a Hadamard rotation needs."""
SCALE_BYTES = 2
"""A scale is a bf16 number, which has fp32's range."""
BITS = {"hadamard-4bit": 4, "fp8": 8}
"""Bits of an element by the method that a message is compressed with."""


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Rows and columns of a tensor seen as a matrix: all dimensions but the last are rows.

    Args:
        shape: of the tensor, such as (sequence, micro-batch, hidden).

    Returns:
        Rows and columns; one row for a vector.
    """
    columns = shape[-1] if shape else 1
    return (math.prod(shape) // columns if columns else 0), columns


def pair_numel(rows: int, columns: int, rank: int) -> int:
    """Elements of P and Q together, (rows, r) and (columns, r) where r is at most full rank."""
    return min(rank, rows, columns) * (rows + columns)


def saves(shape: Sequence[int], rank: int) -> bool:
    """Whether P and Q have fewer elements than the tensor.

    Where they have not, the tensor itself is sent, which is both smaller and exact.
    """
    rows, columns = matrix_shape(shape)
    return pair_numel(rows, columns, rank) < rows * columns


def num_epilogue_messages(receiver: int, num_stages: int, num_micro_batches: int) -> int:
    """Messages of an iteration on a link that are sent in the epilogue.

    Args:
        receiver: the stage that receives activation gradients on the link, from 0.
        num_stages: of the pipeline.
        num_micro_batches: of an iteration.
    """
    return min(num_micro_batches, num_stages - receiver - 1)


def ring_bytes(nbytes: int, num_ranks: int) -> int:
    """What each rank sends when a ring of ranks all-reduces tensors of ``nbytes``."""
    return 2 * (num_ranks - 1) * nbytes // num_ranks


def num_blocks(numel: int) -> int:
    """Blocks that hold ``numel`` elements; the last one may be filled in part."""
    return -(-numel // BLOCK_NUMEL)


def block_bytes(bits: int) -> int:
    """Bytes of one block of elements of ``bits`` bits, its scale included."""
    return BLOCK_NUMEL * bits // 8 + SCALE_BYTES


def packed_bytes(numel: int, bits: int) -> int:
    """Bytes of ``numel`` elements of ``bits`` bits, scales and the filling of blocks included."""
    return num_blocks(numel) * block_bytes(bits)


def message_numel(numel: int, bits: int, element_bytes: int) -> int:
    """Elements of a message's own type that hold the bytes of a compressed one.

    Args:
        numel: elements of the message.
        bits: of an element once compressed.
        element_bytes: of an element of the message's type.
    """
    return -(-packed_bytes(numel, bits) // element_bytes)
