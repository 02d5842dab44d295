"""What the reading of compiled kernels refuses, and kernels that take no care for rounding.

That its arithmetic is right is seen where compiled code has the host kernel's bits
(``test_triton_adam.py``), of which these are the negative controls.
"""

import re

import numpy as np
import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch")

import triton.language as tl  # noqa: E402
from ptx import Program, PtxError, PtxKernel, Region, use_target  # noqa: E402

HEAD = """.extern .shared .align 16 .b8 pool[];
.visible .entry kernel(
	.param .u64 .ptr .global .align 1 kernel_param_0
)
.reqntid 4
{
	.reg .pred 	%p<3>;
	.reg .b16 	%rs<3>;
	.reg .b32 	%r<9>;
	.reg .b64 	%rd<9>;
	ld.param.b64 	%rd1, [kernel_param_0];
	mov.u32 	%r1, %tid.x;
	mov.u32 	%r2, %ctaid.x;
	shl.b32 	%r3, %r2, 2;
	or.b32 	%r3, %r3, %r1;
	cvt.u64.u32 	%rd2, %r3;
	shl.b64 	%rd3, %rd2, 2;
	add.s64 	%rd4, %rd1, %rd3;
"""


@pytest.mark.parametrize(
    ("body", "cause"),
    [
        ("mul.rn.ftz.f32 %r4, %r1, %r2;", "unknown instruction"),
        ("sqrt.approx.f32 %r4, %r1;", "unknown instruction"),
        ("bra $L__BB0_1;", "unknown instruction"),
        ('.pragma "nounroll";', "no instruction"),
        ("mul.rn.f32 %r4, %r5, %r5;", "%r5 has no value"),
        ("mul.rn.f32 %r4, %rd4, %r1;", "%rd4 has not 32 bits"),
        ("mul.rn.f32 %rd5, %r1, %r1;", "%rd5 has another width"),
        ("mul.rn.f32 %r4, %r1;", "2 sources expected"),
        ("st.global.b32 [%rd4+4], %r1;", "outside of every array"),
        ("st.global.b32 [%rd4+-4], %r1;", "outside of every array"),
        ("st.global.b32 [%rd4+2], %r1;", "misaligned access"),
        ("st.global.b32 [%rd1], %r1;", "threads race"),
        ("st.shared.b32 [%r3+64], %r1;", "outside of shared memory"),
    ],
)
def test_what_it_does_not_know_or_a_gpu_would_not_do_is_refused_by_line(body, cause):
    """Two blocks of four threads, ``%rd4`` the address of a thread's own fp32 element."""
    data = np.arange(8, dtype=np.float32)
    with pytest.raises(PtxError, match=f"line \\d+: .*{cause}"):
        Program(HEAD + f"\t{body}\n\tret;\n}}\n").run(
            2, [4096], [Region(4096, data.view(np.uint8))], 64
        )


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
    options = {"WHAT": what, "BLOCK": 256, "enable_fp_fusion": enable_fp_fusion}
    PtxKernel(plain_kernel)[(1,)](a, b, c, out, **options)
    return (a, b, c), out


def test_a_contracted_sum_has_other_bits(monkeypatch):
    """What the launch option and the explicit multiply-adds are for."""
    (a, b, c), out = launch_plain(monkeypatch, "multiply_add", enable_fp_fusion=True)
    assert not torch.equal(out, a * b + c)
    assert torch.allclose(out, a * b + c)


@pytest.mark.parametrize(
    ("what", "opcode"), [("root", "sqrt.approx"), ("quotient", "div.full"), ("multiply_add", "add")]
)
def test_approximate_and_separate_operations_are_refused(monkeypatch, what, opcode):
    with pytest.raises(PtxError, match=rf"{re.escape(opcode)}[\w.]* .*unknown instruction"):
        launch_plain(monkeypatch, what, enable_fp_fusion=False)
