"""The tensors one Adam step works on."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class AdamTensors:
    """One subgroup's or tile's tensors, each of shape (numel,) and contiguous.

    Attributes:
        master: Master weights, fp32, bf16 or fp16, updated in place.
        exp_avg, exp_avg_sq: Moments, both fp32, bf16 or fp16, updated in place.
        grad: Summed gradient, fp32, bf16 or fp16, read only. With 16-bit master weights it is
            rounded to their type before and after it is unscaled, as DeepSpeed's own copy of it is.
        weights: The weights the model computes with, fp32, bf16 or fp16, written.
    """

    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    grad: Tensor
    weights: Tensor

    @property
    def numel(self) -> int:
        """Elements of each tensor."""
        return self.master.numel()

    @property
    def state(self) -> tuple[Tensor, Tensor, Tensor]:
        """Master weights and both moments."""
        return (self.master, self.exp_avg, self.exp_avg_sq)

    def narrow(self, start: int, numel: int) -> AdamTensors:
        """Views of ``numel`` elements from ``start``."""
        # A list, not a generator: see [Note: lists] in ``executor``.
        return AdamTensors(*[tensor.narrow(0, start, numel) for tensor in vars(self).values()])


@dataclass(frozen=True)
class Difference:
    """A number that is not what it should be.

    Attributes:
        name: Of the tensor.
        index: First element that differs.
        value: What is there.
        expected: What should be.
        count: How many elements of the tensor differ.
    """

    name: str
    index: int
    value: float
    expected: float
    count: int


def first_difference(found: AdamTensors, expected: AdamTensors) -> Difference | None:
    """Where what a step writes differs in value or sign, if anywhere; NaN equals NaN.

    Processors agree on every bit of a number, but not on which NaN they make.

    Args:
        found: On any device.
        expected: On the host.
    """
    for name in ("master", "exp_avg", "exp_avg_sq", "weights"):
        here, there = getattr(found, name).cpu(), getattr(expected, name)
        is_same = (here == there) & (here.signbit() == there.signbit())
        differs = ~(is_same | (here.isnan() & there.isnan()))
        if differs.any():
            idx = int(differs.nonzero()[0])
            return Difference(name, idx, here[idx].item(), there[idx].item(), int(differs.sum()))
    return None


def tail_within(tail_start: int, first: int, numel: int) -> int:
    """Where the tail begins in a part of a tensor, from 0 to ``numel``.

    Args:
        tail_start: Where it begins in the tensor.
        first: First element of the part.
        numel: Elements of the part.
    """
    return min(max(tail_start - first, 0), numel)
