"""Bytes and messages that this rank sends, by kind of communication."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from torch import Tensor

from optimus_cc.sizes import ring_bytes


class Kind(StrEnum):
    """What is communicated, as in the paper's breakdown of an iteration."""

    FORWARD = "forward"
    """Activations to the next pipeline stage."""
    BACKWARD = "backward"
    """Activation gradients to the previous pipeline stage."""
    GRADIENTS = "gradients"
    """Gradients over the data-parallel ranks."""
    EMBEDDING = "embedding"
    """The tied embedding's gradient over the first and the last stage."""


@dataclass
class Sent:
    """What was sent of one kind."""

    messages: int = 0
    compressed: int = 0
    """How many of the messages, or of the tensors reduced, were compressed."""
    sent_bytes: int = 0


class Traffic:
    """Counts at the calls that send; a reduction counts what a ring sends from each rank."""

    def __init__(self) -> None:
        self.sent = {kind: Sent() for kind in Kind}

    def message(self, kind: Kind, tensor: Tensor, compressed: bool = False) -> None:
        """Count a tensor sent to one other rank."""
        self._count(kind, tensor.nbytes, compressed)

    def all_reduce(
        self, kind: Kind, tensor: Tensor, num_ranks: int, compressed: bool = False
    ) -> None:
        """Count an all-reduce: a ring sends each rank's tensor 2 (n - 1) / n times."""
        self._count(kind, ring_bytes(tensor.nbytes, num_ranks), compressed)

    def reset(self) -> None:
        """Start from nothing, such as after an iteration."""
        self.sent = {kind: Sent() for kind in Kind}

    def _count(self, kind: Kind, sent_bytes: int, compressed: bool) -> None:
        sent = self.sent[kind]
        sent.messages += 1
        sent.compressed += compressed
        sent.sent_bytes += sent_bytes
