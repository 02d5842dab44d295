"""Numbers of four or eight bits, with a scale for every block of 64.

``hadamard-4bit`` rotates each block before it rounds, after the idea of TAH-Quant (arXiv
2506.01352) and of SDP4Bit (arXiv 2410.15526): random signs and a Hadamard matrix spread one large
element over its whole block, so that it no longer decides the scale alone. ``fp8`` casts. Both
round to the nearest, so that equal inputs give equal bytes on every rank.

The eight bits are e4m3's, though e5m2 is the usual choice for gradients: e5m2 buys range with a bit
of precision, and with a scale for every block the range is that of 64 neighbours, which e4m3's 18
powers of two hold.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from optimus_cc.sizes import BITS, BLOCK_NUMEL, block_bytes, num_blocks

_ZERO = 8
"""The stored code of 0: the whole numbers from -7 to 7 are stored as 1 to 15."""


class Blocks(ABC):
    """Packs fp32 numbers into bytes: of each block its codes, then its scale."""

    bits: int
    """Of an element."""
    largest: float
    """The largest magnitude that a code stands for, before it is scaled."""

    @torch.no_grad()
    def pack(self, numbers: Tensor) -> Tensor:
        """Bytes of some numbers.

        Args:
            numbers: any shape, fp32. A block with a number that is not finite, or that overflows
                in the rotation, arrives as NaN throughout.

        Returns:
            (blocks, bytes of a block) uint8.
        """
        flat = numbers.flatten()
        filled = torch.nn.functional.pad(flat, (0, -flat.numel() % BLOCK_NUMEL))
        blocks = self._rotate(filled.view(-1, BLOCK_NUMEL))
        scales = (blocks.abs().amax(1, keepdim=True) / self.largest).bfloat16()
        # Codes must be of the scale that arrives; zeros, and what is as small, need none.
        divisors = torch.where(scales == 0, 1, scales).float()
        return torch.cat([self._codes(blocks / divisors), scales.view(torch.uint8)], 1)

    @torch.no_grad()
    def unpack(self, packed: Tensor, numel: int) -> Tensor:
        """The numbers that some bytes stand for.

        Args:
            packed: from :meth:`pack`, any shape; bytes after the last block are left out.
            numel: how many there are.

        Returns:
            (numel,) fp32.
        """
        size = num_blocks(numel), block_bytes(self.bits)
        blocks = packed.flatten()[: size[0] * size[1]].view(size)
        codes, scales = blocks[:, : BLOCK_NUMEL * self.bits // 8], blocks[:, -2:].contiguous()
        numbers = self._numbers(codes.contiguous()) * scales.view(torch.bfloat16).float()
        return self._rotate_back(numbers).flatten()[:numel]

    def _rotate(self, blocks: Tensor) -> Tensor:
        return blocks

    def _rotate_back(self, blocks: Tensor) -> Tensor:
        return blocks

    @abstractmethod
    def _codes(self, scaled: Tensor) -> Tensor:
        """Bytes of (blocks, 64) fp32 numbers of at most ``largest``."""

    @abstractmethod
    def _numbers(self, codes: Tensor) -> Tensor:
        """What bytes stand for, (blocks, 64) fp32."""


class HadamardBlocks(Blocks):
    """Whole numbers from -7 to 7 of rotated blocks."""

    bits, largest = BITS["hadamard-4bit"], 7.0

    def __init__(self, seed: int = 0) -> None:
        """Draw the signs; ranks that exchange messages have the same seed."""
        self._rotation = rotation(seed)

    def _rotate(self, blocks: Tensor) -> Tensor:
        return blocks @ self._rotation_on(blocks.device)

    def _rotate_back(self, blocks: Tensor) -> Tensor:
        return blocks @ self._rotation_on(blocks.device).T

    def _rotation_on(self, device: torch.device) -> Tensor:
        self._rotation = self._rotation.to(device)
        return self._rotation

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

    bits, largest = BITS["fp8"], torch.finfo(torch.float8_e4m3fn).max

    def _codes(self, scaled: Tensor) -> Tensor:
        return scaled.to(torch.float8_e4m3fn).view(torch.uint8)

    def _numbers(self, codes: Tensor) -> Tensor:
        return codes.view(torch.float8_e4m3fn).float()


def rotation(seed: int) -> Tensor:
    """An orthogonal matrix: random signs of the rows of a Hadamard matrix over its root.

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
