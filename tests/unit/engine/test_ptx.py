"""The emulation that runs compiled device kernels: exact arithmetic, and what it refuses."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st
from ptx import OPERATIONS, Program, PtxError, Region, fused_multiply_add

F32 = (24, 128)
"""Bits of the significand, and the exponent of the first power of two that is too large."""


def nearest(exact, digits, limit):
    """The number of a format that is nearest to a fraction, ties to even; infinity above all."""
    if exact == 0:
        return 0.0
    size = abs(exact)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    exponent -= size < Fraction(2) ** exponent
    unit = Fraction(2) ** (max(exponent, 2 - limit) - digits + 1)
    rounded = round(exact / unit) * unit  # a fraction's round() takes ties to even
    if abs(rounded) >= Fraction(2) ** limit:
        return math.copysign(math.inf, exact)
    return float(rounded)


def root(exact):
    """Square root to so many digits that only its last tells how the rest goes on."""
    scaled = exact * 2**400
    whole = math.isqrt(scaled.numerator // scaled.denominator)
    return Fraction(2 * whole + (Fraction(whole * whole) != scaled), 2**201)


def fp32(number):
    return float(np.float32(number))


def few_digits(significand, exponent):
    return math.ldexp(significand, exponent)


any_number = st.floats(width=32, allow_nan=False, allow_infinity=False)
# Few digits, and exponents that meet: sums and products that lie half way between two numbers.
rigged = st.builds(few_digits, st.integers(-4099, 4099), st.integers(-14, 14))
number = st.one_of(any_number, rigged)
numbers = st.tuples(number, number, number)


def apply(opcode, *values):
    with np.errstate(all="ignore"):
        arrays = [np.array([value], dtype=np.float32) for value in values]
        return OPERATIONS[opcode].apply(*arrays)[0]


@settings(max_examples=2000, deadline=None)
@given(numbers)
@example((4097.0, 4097.0, 2.0**-60))
@example((4097.0, 4097.0, -(2.0**-60)))
@example((4099.0, -4097.0, 2.0**-60))
@example((2.0**-75, 2.0**-75, 2.0**-149))
@example((fp32(2.0**-75 * 1.5), 2.0**-75, 0.0))
@example((2.0**64, 2.0**64, -(2.0**103)))
@example((2.0**64, 2.0**64, -(2.0**102)))
@example(
    (math.ldexp(18631, 50), math.ldexp(1801, 53), fp32(-1e-30))
)  # 2^128 - 2^103, a little less
def test_multiply_adds_are_rounded_once(triple):
    a, b, c = map(Fraction, triple)
    assert apply("fma.rn.f32", *triple) == nearest(a * b + c, *F32)


def test_a_multiply_add_rounded_twice_would_be_seen():
    """Negative control of the case above."""
    a, c = 4097.0, np.float64(2.0**-60)
    twice = np.float32(a * a + c)
    assert twice != nearest(Fraction(a) ** 2 + Fraction(c), *F32)


@settings(max_examples=1000, deadline=None)
@given(number, number)
@example(fp32(1e-30), fp32(1e-12))
@example(fp32(1e-38), 0.1)
@example(1.0, fp32(3e38))
def test_products_quotients_and_roots_are_rounded_once(a, b):
    exact_a, exact_b = Fraction(fp32(a)), Fraction(fp32(b))
    assert apply("mul.rn.f32", a, b) == nearest(exact_a * exact_b, *F32)
    if exact_b:
        assert apply("div.rn.f32", a, b) == nearest(exact_a / exact_b, *F32)
    assert apply("sqrt.rn.f32", abs(a)) == nearest(root(abs(exact_a)), *F32)


@settings(max_examples=1000, deadline=None)
@given(number)
@example(1.00390625)
@example(1.01171875)
@example(65519.99609375)
@example(65520.0)
@example(fp32(3.4e38))
@example(fp32(1e-40))
@example(fp32(1e-8))
def test_conversions_are_rounded_once(value):
    half = apply("cvt.rn.f16.f32", value)
    assert half.view(np.float16) == nearest(Fraction(fp32(value)), 11, 16)
    brain = apply("cvt.rn.bf16.f32", value)
    wide = OPERATIONS["cvt.f32.bf16"].apply(np.array([brain]))[0]
    assert wide == nearest(Fraction(fp32(value)), 8, 128)


def test_signs_of_zero_infinities_and_no_numbers_are_kept():
    zero, infinity = np.float32(-0.0), np.float32(np.inf)
    assert np.signbit(apply("fma.rn.f32", 1.0, zero, zero))
    assert np.signbit(apply("fma.rn.f32", -1e-30, 1e-30, 0.0))
    assert apply("fma.rn.f32", 3e38, 2.0, 0.0) == infinity
    assert apply("fma.rn.f32", 1.0, infinity, -1.0) == infinity
    for found in (apply("fma.rn.f32", 0.0, infinity, 1.0), apply("sqrt.rn.f32", -1.0)):
        assert found.view(np.uint32) == 0x7FFFFFFF
    assert apply("cvt.rn.bf16.f32", np.nan) == apply("cvt.rn.f16.f32", np.nan) == 0x7FFF


def test_an_infinite_error_does_not_reach_the_sum():
    with np.errstate(all="ignore"):
        a = np.array([np.inf, -np.inf, 3e38], dtype=np.float32)
        assert np.array_equal(fused_multiply_add(a, np.ones_like(a), np.ones_like(a)), a)


HEAD = """.visible .entry kernel(
	.param .u64 .ptr .global .align 1 kernel_param_0,
	.param .u32 kernel_param_1
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


def run(body, numel=8, second=5, shared=64):
    """Two blocks of four threads, ``%rd4`` the address of a thread's own fp32 element."""
    data = np.arange(numel, dtype=np.float32)
    text = HEAD.replace(".visible", ".extern .shared .align 16 .b8 pool[];\n.visible")
    program = Program(text + body + "\n\tret;\n}\n")
    program.run(2, [4096, second], [Region(4096, data.view(np.uint8))], shared)
    return data


SHARED = """
	ld.global.b32 %r4, [%rd4];
	shl.b32 %r5, %r1, 2;
	mov.b32 %r6, pool;
	add.s32 %r6, %r6, %r5;
	st.shared.b32 [%r6], %r4;
	bar.sync 0;
	xor.b32 %r7, %r5, 12;
	ld.shared.b32 %r8, [%r7];
	st.global.b32 [%rd4], %r8;"""


OTHER_BLOCK = """
	st.global.b32 [%rd4], %r1;
	bar.sync 0;
	xor.b32 %r5, %r3, 4;
	cvt.u64.u32 %rd5, %r5;
	shl.b64 %rd6, %rd5, 2;
	add.s64 %rd7, %rd1, %rd6;
	ld.global.b32 %r6, [%rd7];"""


@pytest.mark.parametrize(
    ("body", "cause"),
    [
        ("mul.rn.ftz.f32 %r4, %r1, %r2;", "unknown instruction"),
        ("sqrt.approx.f32 %r4, %r1;", "unknown instruction"),
        ("mul.f32 %r4, %r1, %r2;", "unknown instruction"),
        ("bra $L__BB0_1;", "unknown instruction"),
        ("bar.sync 1;", "unknown instruction"),
        ("st.shared::cluster.b32 [%r3], %r1;", "unknown instruction"),
        ("ld.global.ca.b32 %r4, [%rd4];", "unknown instruction"),
        ("mul.rn.f32 %r4, %r5, %r5;", "%r5 has no value"),
        ("mul.rn.f32 %r4, %rd4, %r1;", "%rd4 has not 32 bits"),
        ("mul.rn.f32 %rd5, %r1, %r1;", "%rd5 has another width"),
        ("mul.rn.f32 %r4, %r1;", "2 sources expected"),
        ("st.global.b32 [%rd4+4], %r1;", "outside of every array"),
        ("st.global.b32 [%rd4+-4], %r1;", "outside of every array"),
        ("st.global.b32 [%rd4+2], %r1;", "misaligned access"),
        ("st.global.b32 [%rd1], %r1;", "threads race"),
        ("ld.global.b32 %r4, [%rd1];\nst.global.b32 [%rd4], %r1;", "threads race"),
        ("st.shared.b32 [%r3+64], %r1;", "outside of shared memory"),
        (SHARED.replace("bar.sync 0;", ""), "threads race"),
        (OTHER_BLOCK, "threads race"),
    ],
)
def test_what_it_does_not_know_or_a_gpu_would_not_do_is_refused_by_line(body, cause):
    with pytest.raises(PtxError, match=f"line \\d+: .*{cause}"):
        run(body)


def test_a_line_that_is_no_instruction_is_refused():
    with pytest.raises(PtxError, match=r"line 19: \.pragma"):
        Program(HEAD + '\t.pragma "nounroll";\n}\n')
