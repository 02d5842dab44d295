"""The tensors one Adam step works on."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class AdamTensors:
    """One subgroup's or tile's tensors, each of shape (numel,) and contiguous.

    Attributes:
        master: Master weights, fp32, updated in place.
        exp_avg, exp_avg_sq: Moments, fp32, updated in place.
        grad: Summed gradient, fp32, bf16 or fp16, read only.
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
        return AdamTensors(*(tensor.narrow(0, start, numel) for tensor in vars(self).values()))


def differing(found: Tensor, expected: Tensor) -> Tensor:
    """Where two tensors on the host, shape (numel,), differ in value or sign; NaN equals NaN.

    Processors agree on every bit of a number, but not on which NaN they make.
    """
    same = (found == expected) & (found.signbit() == expected.signbit())
    return ~(same | (found.isnan() & expected.isnan()))
