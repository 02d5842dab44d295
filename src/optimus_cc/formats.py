"""What an activation gradient looks like on a link: a low-rank pair, or numbers of few bits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from optimus_cc import low_rank
from optimus_cc.blocks import Blocks, Float8Blocks, HadamardBlocks
from optimus_cc.settings import Settings
from optimus_cc.sizes import message_numel


class Format(ABC):
    """Turns messages into flat tensors of their own type, and back."""

    @abstractmethod
    def packed_numel(self, shape: torch.Size, dtype: torch.dtype) -> int:
        """Elements of the flat tensor that stands for a message of this shape and type."""

    @abstractmethod
    def pack(self, key: Hashable, message: Tensor, dtype: torch.dtype) -> Tensor:
        """The flat tensor of a message.

        Args:
            key: what a format remembers from message to message is kept under it.
            message: (..., hidden) fp32.
            dtype: of the message as it was given, and of the flat tensor.
        """

    @abstractmethod
    def unpack(self, packed: Tensor, shape: torch.Size) -> Tensor:
        """The message that a flat tensor stands for, of ``shape``, fp32."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """What is remembered from message to message."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave."""


class Pairs(Format):
    """P and Q of a matrix with one row a token and one column a hidden unit."""

    def __init__(self, rank: int, seed: int) -> None:
        """Keep the rank, and the seed of the first queries."""
        self._low_rank = low_rank.LowRank(rank, seed)

    def packed_numel(self, shape: torch.Size, dtype: torch.dtype) -> int:  # noqa: D102 - Format's
        del dtype
        return low_rank.pair_numel(*low_rank.matrix_shape(shape), self._low_rank.rank)

    def pack(self, key: Hashable, message: Tensor, dtype: torch.dtype) -> Tensor:  # noqa: D102
        matrix = message.reshape(1, *low_rank.matrix_shape(message.shape))
        pair = self._low_rank.factorise(key, matrix)
        return torch.cat([factor.flatten() for factor in pair]).to(dtype)

    def unpack(self, packed: Tensor, shape: torch.Size) -> Tensor:  # noqa: D102
        rows, columns = low_rank.matrix_shape(shape)
        rank = packed.numel() // (rows + columns)
        p, q = torch.split(packed.float(), [rows * rank, columns * rank])
        product: Tensor = p.view(rows, rank) @ q.view(columns, rank).T
        return product.view(shape)

    def state_dict(self) -> dict[str, Any]:  # noqa: D102
        return self._low_rank.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: D102
        self._low_rank.load_state_dict(state)


class FewBits(Format):
    """Blocks of few bits, whose bytes are read as numbers of the message's type on the way.

    The receiver has a buffer of the message's type, and nothing computes with what is in it.
    """

    def __init__(self, blocks: Blocks) -> None:
        """Keep how blocks are packed; nothing is remembered from message to message."""
        self._blocks = blocks

    def packed_numel(self, shape: torch.Size, dtype: torch.dtype) -> int:  # noqa: D102
        return message_numel(shape.numel(), self._blocks.bits, dtype.itemsize)

    def pack(self, key: Hashable, message: Tensor, dtype: torch.dtype) -> Tensor:  # noqa: D102
        del key
        packed = self._blocks.pack(message).flatten()
        return torch.nn.functional.pad(packed, (0, -packed.numel() % dtype.itemsize)).view(dtype)

    def unpack(self, packed: Tensor, shape: torch.Size) -> Tensor:  # noqa: D102
        return self._blocks.unpack(packed.view(torch.uint8), shape.numel()).view(shape)

    def state_dict(self) -> dict[str, Any]:  # noqa: D102
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: D102
        del state


def of(settings: Settings, seed: int) -> Format:
    """The format that the settings ask for."""
    match settings.inter_grad_comp_method:
        case "hadamard-4bit":
            return FewBits(HadamardBlocks(seed))
        case "fp8":
            return FewBits(Float8Blocks())
        case _:
            return Pairs(settings.inter_grad_comp_rank, seed)
