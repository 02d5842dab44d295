"""Numbers and tensors of one Adam step, with the roundings of DeepSpeedCPUAdam's C++ object.

That object keeps ``beta^t`` as a product built up step by step in fp32, and falls back on ``pow``
when the step jumps (after loading a checkpoint) or the betas change; before DeepSpeed 0.19 also for
every subgroup of a step but the first. Both give slightly different bits, so ``BetaPowers`` repeats
its state machine, one instance an optimizer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

_ONE = np.float32(1.0)


@dataclass(frozen=True)
class AdamScalars:
    """Numbers of one Adam step of one subgroup. All are fp32. Kernels take them by name.

    Attributes:
        grad_scale: Multiplies the gradient first (unscaling and clipping in one factor).
        beta1, one_minus_beta1, beta2, one_minus_beta2: Decay of the moments.
        rsqrt_bias2: ``1 / sqrt(1 - beta2^t)``.
        eps: Added to the denominator.
        step_size: ``-lr / (1 - beta1^t)``.
        decay: AdamW: ``-lr * weight_decay``; Adam: ``weight_decay``; 0 for none.
        decoupled: 1 for AdamW, 0 for Adam with L2 regularisation.
    """

    grad_scale: np.float32
    beta1: np.float32
    one_minus_beta1: np.float32
    beta2: np.float32
    one_minus_beta2: np.float32
    rsqrt_bias2: np.float32
    eps: np.float32
    step_size: np.float32
    decay: np.float32
    decoupled: np.float32


class BetaPowers:
    """``beta1^t`` and ``beta2^t`` as one DeepSpeedCPUAdam holds them.

    Args:
        betas: The betas the optimizer was constructed with.
        pow_on_repeat: Whether a step that is asked for again gets ``pow`` instead of what it had.
    """

    def __init__(self, betas: tuple[float, float], pow_on_repeat: bool = False) -> None:
        self._pow_on_repeat = pow_on_repeat
        self._step = 0
        self._betas = _as_float32(betas)
        self._powers = (_ONE, _ONE)

    def at(self, step: int, betas: tuple[float, float]) -> tuple[np.float32, np.float32]:
        """Return the powers at ``step``; call once a subgroup, in DeepSpeed's order.

        Args:
            step: Step count of the subgroup being updated, from 1.
            betas: Betas of its parameter group.

        Returns:
            ``(beta1^step, beta2^step)`` in fp32.
        """
        wanted = _as_float32(betas)
        if wanted != self._betas:
            self._betas = wanted
            self._powers = _powers(wanted, step)
        elif step == self._step + 1:
            self._powers = (self._powers[0] * wanted[0], self._powers[1] * wanted[1])
        elif step != self._step or self._pow_on_repeat:
            self._powers = _powers(wanted, step)
        self._step = step
        return self._powers


def _as_float32(betas: tuple[float, float]) -> tuple[np.float32, np.float32]:
    return np.float32(betas[0]), np.float32(betas[1])


def _powers(betas: tuple[np.float32, np.float32], step: int) -> tuple[np.float32, np.float32]:
    # C++ promotes pow(float, size_t) to double and rounds once on assignment.
    return np.float32(float(betas[0]) ** step), np.float32(float(betas[1]) ** step)


def adam_scalars(
    group: dict[str, Any],
    powers: tuple[np.float32, np.float32],
    grad_scale: float,
    decoupled: bool,
) -> AdamScalars:
    """Compute the scalars of one subgroup's step.

    Args:
        group: The optimizer's parameter group: ``lr``, ``betas``, ``eps``, ``weight_decay``,
            ``bias_correction``.
        powers: ``beta^t`` from :class:`BetaPowers`.
        grad_scale: Factor of the gradient; rounded to fp32.
        decoupled: Whether the optimizer is AdamW.
    """
    beta1, beta2 = _as_float32(group["betas"])
    lr = np.float32(group["lr"])
    weight_decay = np.float32(group["weight_decay"])
    bias1, rsqrt_bias2 = _ONE, _ONE
    if group["bias_correction"]:
        bias1 = _ONE - powers[0]
        rsqrt_bias2 = _ONE / np.sqrt(_ONE - powers[1])
    if weight_decay <= 0:
        decay = np.float32(0)
    else:
        decay = -lr * weight_decay if decoupled else weight_decay
    return AdamScalars(
        grad_scale=np.float32(grad_scale),
        beta1=beta1,
        one_minus_beta1=_ONE - beta1,
        beta2=beta2,
        one_minus_beta2=_ONE - beta2,
        rsqrt_bias2=rsqrt_bias2,
        eps=np.float32(group["eps"]),
        step_size=-lr / bias1,
        decay=decay,
        decoupled=np.float32(decoupled),
    )


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
        """Return views of ``numel`` elements from ``start``."""
        return AdamTensors(
            **{name: tensor.narrow(0, start, numel) for name, tensor in vars(self).items()}
        )


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
    """Find where what a step wrote differs in value or sign, if anywhere; NaN equals NaN.

    Processors agree on every bit of a number, but not on which NaN they make.
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
    """Return where the tail begins in ``numel`` elements from ``first``, from 0 to ``numel``."""
    return min(max(tail_start - first, 0), numel)
