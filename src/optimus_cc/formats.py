"""Formats of activation gradients on a link: low-rank pairs, and numbers of few bits.

Numbers have four or eight bits, with a scale for every block of 64. ``hadamard-4bit`` rotates each
block before it rounds, after the idea of TAH-Quant (arXiv 2506.01352) and of SDP4Bit (arXiv
2410.15526): random signs and a Hadamard matrix spread one large element over its whole block, so
that it no longer decides the scale alone. ``fp8`` casts. Both round to the nearest, so that equal
inputs give equal bytes on every rank.

The eight bits are e4m3's, though e5m2 is the usual choice for gradients: e5m2 buys range with a bit
of precision, and with a scale for every block the range is that of 64 neighbours, which e4m3's 18
powers of two hold.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from optimus_cc.low_rank import LowRank, Memory
from optimus_cc.settings import Settings
from optimus_cc.sizes import BLOCK_NUMEL, matrix_shape, packed_bytes, pair_numel

_ZERO = 8
"""The stored code of 0: the whole numbers from -7 to 7 are stored as 1 to 15."""


class Format(ABC):
    """Turns messages into flat tensors of their own type, and back."""

    @abstractmethod
    def packed_numel(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """Return the elements of the flat tensor that stands for a message."""

    @abstractmethod
    def pack(self, message: Tensor, dtype: torch.dtype, key: Hashable = 0) -> Tensor:
        """Return the flat tensor of a message.

        Args:
            message: (..., hidden) fp32.
            dtype: of the message as it was given, and of the flat tensor.
            key: what a format remembers from message to message is kept under it.
        """

    @abstractmethod
    def unpack(self, packed: Tensor, shape: Sequence[int]) -> Tensor:
        """Return the message that a flat tensor stands for, of ``shape``, fp32."""


class Pairs(Format):
    """P and Q of a matrix with one row a token and one column a hidden unit."""

    def __init__(self, rank: int, seed: int, memory: Memory) -> None:
        """Keep the rank, and the seed of the first queries."""
        self._low_rank = LowRank(rank, seed, memory)

    def packed_numel(self, shape: Sequence[int], dtype: torch.dtype) -> int:  # noqa: D102 - Format
        del dtype
        return pair_numel(*matrix_shape(shape), self._low_rank.rank)

    def pack(self, message: Tensor, dtype: torch.dtype, key: Hashable = 0) -> Tensor:  # noqa: D102
        matrix = message.reshape(1, *matrix_shape(message.shape))
        pair = self._low_rank.factorise(key, matrix)
        return torch.cat([factor.flatten() for factor in pair]).to(dtype)

    def unpack(self, packed: Tensor, shape: Sequence[int]) -> Tensor:  # noqa: D102
        rows, columns = matrix_shape(shape)
        rank = packed.numel() // (rows + columns)
        p, q = torch.split(packed.float(), [rows * rank, columns * rank])
        product: Tensor = p.view(rows, rank) @ q.view(columns, rank).T
        return product.view(shape)


class Blocks(Format):
    """Numbers of few bits: of each block its codes, then its scale.

    Their bytes are read as numbers of the message's type on the way: the receiver has a buffer of
    that type, and nothing computes with what is in it. A block with a number that is not finite,
    or that overflows in the rotation, arrives as NaN throughout.
    """

    bits: int  # of an element
    largest: float
    """The largest magnitude that a code stands for, before it is scaled."""

    def packed_numel(self, shape: Sequence[int], dtype: torch.dtype) -> int:  # noqa: D102
        return -(-packed_bytes(math.prod(shape), self.bits) // dtype.itemsize)

    @torch.no_grad()
    def pack(self, message: Tensor, dtype: torch.dtype, key: Hashable = 0) -> Tensor:  # noqa: D102
        del key
        blocks = self._rotate(_filled(message.flatten(), BLOCK_NUMEL).view(-1, BLOCK_NUMEL))
        scales = (blocks.abs().amax(1, keepdim=True) / self.largest).bfloat16()
        # Codes must be of the scale that arrives; zeros, and what is as small, need none.
        divisors = torch.where(scales == 0, 1, scales).float()
        packed = torch.cat([self._codes(blocks / divisors), scales.view(torch.uint8)], 1)
        return _filled(packed.flatten(), dtype.itemsize).view(dtype)

    @torch.no_grad()
    def unpack(self, packed: Tensor, shape: Sequence[int]) -> Tensor:  # noqa: D102
        numel, code_bytes = math.prod(shape), BLOCK_NUMEL * self.bits // 8
        received = packed.view(torch.uint8)[: packed_bytes(numel, self.bits)]
        blocks = received.view(-(-numel // BLOCK_NUMEL), -1)
        scales = blocks[:, code_bytes:].contiguous().view(torch.bfloat16).float()
        numbers = self._numbers(blocks[:, :code_bytes].contiguous()) * scales
        return self._rotate_back(numbers).flatten()[:numel].view(shape)

    def _rotate(self, blocks: Tensor) -> Tensor:
        return blocks

    def _rotate_back(self, blocks: Tensor) -> Tensor:
        return blocks

    @abstractmethod
    def _codes(self, scaled: Tensor) -> Tensor:
        """Return the bytes of (blocks, 64) fp32 numbers of at most ``largest``."""

    @abstractmethod
    def _numbers(self, codes: Tensor) -> Tensor:
        """Return what bytes stand for, (blocks, 64) fp32."""


class HadamardBlocks(Blocks):
    """Whole numbers from -7 to 7 of rotated blocks."""

    bits, largest = 4, 7.0

    def __init__(self, seed: int = 0) -> None:
        """Draw the signs; ranks that exchange messages have the same seed."""
        self._rotation = rotation(seed)

    def _rotate(self, blocks: Tensor) -> Tensor:
        self._rotation = self._rotation.to(blocks.device)
        return blocks @ self._rotation

    def _rotate_back(self, blocks: Tensor) -> Tensor:
        self._rotation = self._rotation.to(blocks.device)
        return blocks @ self._rotation.T

    def _codes(self, scaled: Tensor) -> Tensor:
        # What is no number has a scale that is none either, and any code will do.
        whole = scaled.round().nan_to_num(0.0).clamp(-self.largest, self.largest)
        codes = (whole + _ZERO).to(torch.uint8)
        return codes[:, 0::2] | codes[:, 1::2] << 4

    def _numbers(self, codes: Tensor) -> Tensor:
        pairs = torch.stack([codes & 15, codes >> 4], dim=2)
        return pairs.flatten(1).float() - _ZERO


class Float8Blocks(Blocks):
    """Numbers of type e4m3."""

    bits, largest = 8, torch.finfo(torch.float8_e4m3fn).max

    def _codes(self, scaled: Tensor) -> Tensor:
        return scaled.to(torch.float8_e4m3fn).view(torch.uint8)

    def _numbers(self, codes: Tensor) -> Tensor:
        return codes.view(torch.float8_e4m3fn).float()


def rotation(seed: int) -> Tensor:
    """Return an orthogonal matrix: random signs of the rows of a Hadamard matrix over its root.

    Args:
        seed: of the signs.

    Returns:
        (64, 64) fp32, every element 1/8 or -1/8; its inverse is its transpose.
    """
    matrix = torch.ones(1, 1)
    while len(matrix) < BLOCK_NUMEL:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), matrix)
    generator = torch.Generator().manual_seed(seed)
    signs = 2.0 * torch.randint(0, 2, (BLOCK_NUMEL, 1), generator=generator) - 1.0
    return signs * matrix / math.sqrt(BLOCK_NUMEL)


def make_format(settings: Settings, seed: int, memory: Memory) -> Format:
    """Return the format that the settings ask for; what it remembers is kept in ``memory``."""
    match settings.inter_grad_comp_method:
        case "hadamard-4bit":
            return HadamardBlocks(seed)
        case "fp8":
            return Float8Blocks()
        case _:
            return Pairs(settings.inter_grad_comp_rank, seed, memory)


def _filled(flat: Tensor, multiple: int) -> Tensor:
    return torch.nn.functional.pad(flat, (0, -flat.numel() % multiple))
