"""Adam on the GPU with the bits of the host kernel.

Every operation is one whose rounding IEEE 754 fixes: products, explicit fused multiply-adds,
round-to-nearest square root and division. No addition stands alone beside a product, so there is
nothing for a compiler to contract. The root and the quotient are PTX: Triton's own functions flush
subnormal numbers before Triton 3.6.

[Note: variants] Triton compiles a kernel anew for every combination of arguments that are 1, that
are multiples of 16 or that are aligned addresses, unless it is told not to look. Here it is told:
one kernel takes only what is all aligned, with wide accesses, and the other takes the rest. Each
has one variant for each set of types and constants, so the self-check can compile all that updates
will launch before training starts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from deep_optimizer_states.core.kernels.adam import AdamScalars, AdamTensors
from deep_optimizer_states.errors import KernelError

BLOCK = 1024
"""Elements a program instance handles."""
ALIGNMENT = 16
"""Alignment of addresses, in bytes, and of the number of elements: Triton knows no other."""


@triton.jit
def _sqrt_rn(x):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    code: tl.constexpr = "sqrt.rn.f32 $0, $1;"
    return tl.inline_asm_elementwise(code, "=f,f", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def _div_rn(x, y):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    code: tl.constexpr = "div.rn.f32 $0, $1, $2;"
    return tl.inline_asm_elementwise(code, "=f,f,f", [x, y], tl.float32, is_pure=True, pack=1)


def _adam(  # type: ignore[no-untyped-def]  # noqa: ANN202, PLR0913 - Triton reads the names
    master,  # noqa: ANN001
    grad,  # noqa: ANN001
    exp_avg,  # noqa: ANN001
    exp_avg_sq,  # noqa: ANN001
    weights,  # noqa: ANN001
    numel,  # noqa: ANN001
    tail,  # noqa: ANN001
    grad_scale,  # noqa: ANN001
    beta1,  # noqa: ANN001
    one_minus_beta1,  # noqa: ANN001
    beta2,  # noqa: ANN001
    one_minus_beta2,  # noqa: ANN001
    rsqrt_bias2,  # noqa: ANN001
    eps,  # noqa: ANN001
    step_size,  # noqa: ANN001
    decay,  # noqa: ANN001
    HAS_DECAY: tl.constexpr,
    DECOUPLED: tl.constexpr,
    STATE_FUSED_TAIL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Step ``numel`` elements; from ``tail`` on, the moments are rounded as a tail."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    kept = master.dtype.element_ty
    # DeepSpeed keeps this gradient in the type of the master weights, and multiplies it there.
    g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32).to(kept).to(tl.float32)
    g = (g * grad_scale).to(kept).to(tl.float32)
    p = tl.load(master + at, mask=inside, other=0.0).to(tl.float32)
    m = tl.load(exp_avg + at, mask=inside, other=0.0).to(tl.float32)
    v = tl.load(exp_avg_sq + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_DECAY and not DECOUPLED:
        g = tl.fma(p, decay, g)
    square = g * g
    first = tl.fma(g, one_minus_beta1, m * beta1)
    second = tl.fma(square, one_minus_beta2, v * beta2)
    if STATE_FUSED_TAIL:
        is_tail = at >= tail
        first = tl.where(is_tail, tl.fma(m, beta1, g * one_minus_beta1), first)
        second = tl.where(is_tail, tl.fma(v, beta2, square * one_minus_beta2), second)
    root = _sqrt_rn(second)
    denominator = tl.fma(root, rsqrt_bias2, eps)
    ratio = _div_rn(first, denominator)
    if HAS_DECAY and DECOUPLED:
        p = tl.fma(p, decay, p)
    p = tl.fma(ratio, step_size, p).to(kept)
    tl.store(master + at, p, mask=inside)
    tl.store(exp_avg + at, first.to(exp_avg.dtype.element_ty), mask=inside)
    tl.store(exp_avg_sq + at, second.to(exp_avg_sq.dtype.element_ty), mask=inside)
    tl.store(weights + at, p.to(tl.float32).to(weights.dtype.element_ty), mask=inside)


_POINTERS = ("master", "grad", "exp_avg", "exp_avg_sq", "weights")
_SCALARS = (
    *("grad_scale", "beta1", "one_minus_beta1", "beta2", "one_minus_beta2", "rsqrt_bias2"),
    *("eps", "step_size", "decay"),
)
# See [Note: variants].
aligned_kernel = triton.jit(_adam, do_not_specialize=["tail"])
any_kernel = triton.jit(
    _adam,
    do_not_specialize=["numel", "tail"],
    do_not_specialize_on_alignment=_POINTERS,
)


class TritonAdam:
    """Adam on CUDA tensors.

    Args:
        tail_mode: Contraction of the last elements, see :class:`~.host.Tail`.

    Raises:
        KernelError: DeepSpeed's tail fuses nothing, which the device kernel does not repeat.
    """

    def __init__(self, tail_mode: int) -> None:
        if tail_mode not in (0, 1):
            raise KernelError(
                "DeepSpeedCPUAdam was built for a CPU without fused multiply-add; device updates "
                'would not equal it. Use policy "all-host"'
            )
        self._tail_mode = tail_mode

    def step(self, tensors: AdamTensors, scalars: AdamScalars, tail_start: int) -> None:
        """Step a subgroup or a tile of it on the current stream.

        Args:
            tensors: What to update, on CUDA.
            scalars: Adam's scalars.
            tail_start: First element rounded as a tail; ``numel`` if none is.
        """
        numel = tensors.numel
        if numel == 0:
            return
        pointers = [getattr(tensors, name) for name in _POINTERS]
        extents = (numel, *(pointer.data_ptr() for pointer in pointers))
        kernel = any_kernel if any(extent % ALIGNMENT for extent in extents) else aligned_kernel
        with torch.cuda.device(tensors.master.device):
            kernel[(triton.cdiv(numel, BLOCK),)](
                *pointers,
                *(numel, tail_start),
                **{name: float(getattr(scalars, name)) for name in _SCALARS},
                HAS_DECAY=bool(scalars.decay != 0.0),
                DECOUPLED=bool(scalars.decoupled),
                STATE_FUSED_TAIL=self._tail_mode == 1,
                BLOCK=BLOCK,
                enable_fp_fusion=False,
            )
