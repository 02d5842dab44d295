"""Adam on host tensors by torch's own operations: the host kernel's bits without a compiler.

Torch has no fused multiply-add, so it is put together in fp64: the product of two fp32 numbers is
exact there, the sum is rounded to odd, and rounding that to fp32 is then the one rounding of a true
fused multiply-add (Boldo and Melquiond, "Emulation of a FMA and correctly rounded sums: proved
algorithms using rounding to odd", IEEE Transactions on Computers 57, 2008). Dozens of passes over
memory: for machines without a C++ compiler, not for speed.
"""

from __future__ import annotations

import functools
import itertools
import logging

import torch
from torch import Tensor

from deep_optimizer_states.errors import KernelError
from deep_optimizer_states.kernels.host import HostAdam
from deep_optimizer_states.kernels.scalars import AdamScalars
from deep_optimizer_states.kernels.tensors import AdamTensors

_log = logging.getLogger(__name__)

CHUNK_NUMEL = 2**20
"""Elements handled at once; bounds the fp64 temporaries."""
STATE_FUSED, UNFUSED = 1, 2
"""Contractions of the last elements, as in ``host_adam.cpp``."""


class TorchAdam:
    """Takes the place of :class:`deep_optimizer_states.kernels.host.HostAdam`.

    Args:
        tail_mode: Contraction of the last elements.
    """

    def __init__(self, tail_mode: int) -> None:
        self._tail_mode = tail_mode

    def step(
        self,
        tensors: AdamTensors,  # on the host
        scalars: AdamScalars,
        tail_start: int,
        num_threads: int,
    ) -> None:
        """Step a subgroup or a tile of it; torch chooses the threads."""
        numel = tensors.numel
        cuts = sorted({*range(0, numel, CHUNK_NUMEL), min(max(tail_start, 0), numel), numel})
        for first, last in itertools.pairwise(cuts):
            mode = self._tail_mode if first >= tail_start else 0
            _step(tensors.narrow(first, last - first), scalars, mode)


def make_host_adam(tail_mode: int) -> HostAdam | TorchAdam:
    """The compiled kernel, or where it cannot be built the slow one, with a warning."""
    try:
        return HostAdam(tail_mode)
    except KernelError as error:
        _warn_once(str(error))
        return TorchAdam(tail_mode)


@functools.cache
def _warn_once(reason: str) -> None:
    _log.warning(
        "deep_optimizer_states: %s. Until then updates on the host go through torch: the same "
        "bits, about a hundred times slower",
        reason,
    )


def fused_multiply_add(a: Tensor, b: Tensor | float, c: Tensor | float) -> Tensor:
    """``a * b + c`` of fp32 numbers, rounded once; fp32, shape of ``a``.

    Args:
        a: fp32 tensor.
        b: fp32 tensor, or a number that fp32 holds.
        c: The same.
    """
    product = a.double() * _wide(b)
    addend = _wide(c)
    total = product + addend
    part = total - product
    error = (product - (total - part)) + (addend - part)
    inexact = (error != 0) & torch.isfinite(total)
    bits = total.view(torch.int64)
    # To odd: towards zero first, then the last bit set, which no later tie can mistake.
    bits = torch.where(inexact & ((error < 0) == (total > 0)), bits - 1, bits)
    bits = torch.where(inexact, bits | 1, bits)
    return bits.view(torch.float64).float()


def _wide(value: Tensor | float) -> Tensor:
    if isinstance(value, Tensor):
        return value.double()
    return torch.tensor(value, dtype=torch.float64, device="cpu")


def _multiply_add(a: Tensor, b: Tensor | float, c: Tensor | float, mode: int) -> Tensor:
    return a * b + c if mode == UNFUSED else fused_multiply_add(a, b, c)


@torch.no_grad()  # type: ignore[untyped-decorator, unused-ignore]
def _step(tensors: AdamTensors, scalars: AdamScalars, mode: int) -> None:
    s = {name: float(value) for name, value in vars(scalars).items()}
    weight, m, v = [tensor.float() for tensor in tensors.state]
    # DeepSpeed keeps this gradient in the type of the master weights, and multiplies it there.
    kept = tensors.master.dtype
    grad = (tensors.grad.to(kept).float() * s["grad_scale"]).to(kept).float()
    if s["decay"] and not s["decoupled"]:
        grad = _multiply_add(weight, s["decay"], grad, mode)
    square = grad * grad
    if mode == STATE_FUSED:
        first = fused_multiply_add(m, s["beta1"], grad * s["one_minus_beta1"])
        second = fused_multiply_add(v, s["beta2"], square * s["one_minus_beta2"])
    else:
        first = _multiply_add(grad, s["one_minus_beta1"], m * s["beta1"], mode)
        second = _multiply_add(square, s["one_minus_beta2"], v * s["beta2"], mode)
    # torch's fp32 square root is not correctly rounded; of fp64's, rounding to fp32 is.
    root = second.double().sqrt().float()
    denominator = _multiply_add(root, s["rsqrt_bias2"], s["eps"], mode)
    ratio = first / denominator
    if s["decay"] and s["decoupled"]:
        weight = _multiply_add(weight, s["decay"], weight, mode)
    tensors.master.copy_(_multiply_add(ratio, s["step_size"], weight, mode))
    tensors.exp_avg.copy_(first)
    tensors.exp_avg_sq.copy_(second)
    tensors.weights.copy_(tensors.master)
