"""Sizes of tensors in few bits, worked out from numbers of elements alone; needs no torch."""

from __future__ import annotations

BLOCK_NUMEL = 64
"""Elements that share a scale; a power of two, as a Hadamard rotation needs."""
SCALE_BYTES = 2
"""A scale is a bf16 number, which has fp32's range."""
BITS = {"hadamard-4bit": 4, "fp8": 8}
"""Bits of an element by the method that a message is compressed with."""


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
