"""Kernels without care for rounding, launched without a GPU: other bits, or refused.

Negative controls of what ``test_triton_adam.py`` finds equal.
"""

import re

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch")

import triton.language as tl  # noqa: E402
from ptx import PtxError  # noqa: E402
from ptx_launch import PtxKernel, use_target  # noqa: E402


@triton.jit
def plain_kernel(a, b, c, out, WHAT: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x, y, z = tl.load(a + at), tl.load(b + at), tl.load(c + at)
    if WHAT == "multiply_add":
        result = x * y + z
    elif WHAT == "root":
        result = tl.sqrt(x)
    else:
        result = x / y
    tl.store(out + at, result)


def launch_plain(monkeypatch, what, enable_fp_fusion):
    use_target(monkeypatch, 90)
    generator = torch.Generator().manual_seed(5)
    a, b, c = torch.rand(3, 256, generator=generator)
    out = torch.empty(256)
    options = {"enable_fp_fusion": enable_fp_fusion, "enable_reflect_ftz": False}
    PtxKernel(plain_kernel)[(1,)](a, b, c, out, WHAT=what, BLOCK=256, **options)
    return (a, b, c), out


def test_a_contracted_sum_has_other_bits(monkeypatch):
    """Negative control: what the launch option and the explicit multiply-adds are for."""
    (a, b, c), out = launch_plain(monkeypatch, "multiply_add", enable_fp_fusion=True)
    assert not torch.equal(out, a * b + c)
    assert torch.allclose(out, a * b + c)


@pytest.mark.parametrize(
    ("what", "opcode"), [("root", "sqrt.approx"), ("quotient", "div.full"), ("multiply_add", "add")]
)
def test_approximate_and_separate_operations_are_refused(monkeypatch, what, opcode):
    with pytest.raises(PtxError, match=rf"{re.escape(opcode)}[\w.]* .*unknown instruction"):
        launch_plain(monkeypatch, what, enable_fp_fusion=False)
