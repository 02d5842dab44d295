"""What the arithmetic instructions of PTX do, on arrays with one element a thread.

The numbers are those of IEEE 754 in hardware: numpy's fp32 product, quotient and square root are
rounded once, to nearest even, and keep subnormal numbers. Only fused multiply-adds are put
together here. As on a GPU, a result that is not a number has one pattern of bits, whatever the
operands had.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

TYPES = {
    **{f"u{bits}": np.dtype(f"u{bits // 8}") for bits in (16, 32, 64)},
    **{f"s{bits}": np.dtype(f"i{bits // 8}") for bits in (16, 32, 64)},
    **{"f16": np.dtype(np.float16), "f32": np.dtype(np.float32)},
}
"""A PTX type's elements; ``f32x2`` is two of ``f32`` in one register."""

_NAN_32, _NAN_16 = np.uint32(0x7FFFFFFF), np.uint16(0x7FFF)


class Operation(NamedTuple):
    """An instruction without side effects: types of its result and sources, and what it does."""

    result: str
    sources: tuple[str, ...]
    apply: Callable[..., Array]


def fused_multiply_add(a: Array, b: Array, c: Array) -> Array:
    """``a * b + c`` of fp32 arrays, rounded once to nearest even.

    In fp64 the product is exact, and so is the error of the sum. Rounding the sum to fp32 goes
    wrong only where it lies half way between two fp32 numbers while the exact sum does not: there
    the error names the right one of the two.
    """
    product, addend = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
    total = product + addend
    part = total - product
    error = (product - (total - part)) + (addend - part)
    near = total.astype(np.float32)
    other = np.nextafter(near, np.copysign(np.float32(np.inf), error.astype(np.float32)))
    half_way = (error != 0) & (_wide(other) - total == total - _wide(near))
    return np.where(half_way, other, near)


def _wide(values: Array) -> Array:
    """As fp64, infinity as the number after the largest of fp32: rounding treats it as that."""
    return np.clip(values.astype(np.float64), -(2.0**128), 2.0**128)


def to_bf16(values: Array) -> Array:
    """Bits of fp32 numbers rounded to bf16, to nearest even."""
    bits = values.view(np.uint32)
    kept, dropped = bits >> np.uint32(16), bits & np.uint32(0xFFFF)
    half = np.uint32(0x8000)
    up = (dropped > half) | ((dropped == half) & (kept % 2 == 1))
    return np.where(np.isnan(values), _NAN_16, (kept + up).astype(np.uint16))


def to_f16(values: Array) -> Array:
    """Bits of fp32 numbers rounded to fp16, to nearest even."""
    return np.where(np.isnan(values), _NAN_16, values.astype(np.float16).view(np.uint16))


def from_bf16(bits: Array) -> Array:
    """The fp32 numbers that bf16 bits stand for."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _pack(high: Array, low: Array) -> Array:
    return high.astype(np.uint32) << np.uint32(16) | low


def _shift_left(values: Array, count: Array) -> Array:
    width = values.dtype.itemsize * 8
    shifted = values << np.minimum(count, width - 1).astype(values.dtype)
    return np.where(count < width, shifted, 0).astype(values.dtype)


def _rounded(function: Callable[..., Array]) -> Callable[..., Array]:
    def apply(*values: Array) -> Array:
        found = function(*values)
        return np.where(np.isnan(found), _NAN_32.view(np.float32), found)

    return apply


def _same(kind: str, sources: int, apply: Callable[..., Array]) -> Operation:
    return Operation(kind, (kind,) * sources, apply)


OPERATIONS = {
    "add.s32": _same("u32", 2, np.add),
    "add.s64": _same("u64", 2, np.add),
    "and.b32": _same("u32", 2, np.bitwise_and),
    "or.b32": _same("u32", 2, np.bitwise_or),
    "or.b64": _same("u64", 2, np.bitwise_or),
    "xor.b32": _same("u32", 2, np.bitwise_xor),
    "neg.s32": _same("s32", 1, np.negative),
    "shl.b32": Operation("u32", ("u32", "u32"), _shift_left),
    "shl.b64": Operation("u64", ("u64", "u32"), _shift_left),
    "mul.wide.u32": Operation("u64", ("u32", "u32"), lambda a, b: a.astype(np.uint64) * b),
    "cvt.u64.u32": Operation("u64", ("u32",), lambda a: a.astype(np.uint64)),
    "setp.lt.s64": Operation("pred", ("s64", "s64"), np.less),
    "setp.eq.b64": Operation("pred", ("u64", "u64"), np.equal),
    "mov.pred": Operation("pred", ("pred",), np.copy),
    "selp.f32": Operation("u32", ("u32", "u32", "pred"), lambda a, b, p: np.where(p, a, b)),
    "mul.rn.f32": _same("f32", 2, _rounded(np.multiply)),
    "div.rn.f32": _same("f32", 2, _rounded(np.divide)),
    "sqrt.rn.f32": _same("f32", 1, _rounded(np.sqrt)),
    "fma.rn.f32": _same("f32", 3, _rounded(fused_multiply_add)),
    "mul.rn.f32x2": _same("f32x2", 2, _rounded(np.multiply)),
    "fma.rn.f32x2": _same("f32x2", 3, _rounded(fused_multiply_add)),
    "cvt.f32.f16": Operation("f32", ("f16",), _rounded(lambda a: a.astype(np.float32))),
    "cvt.f32.bf16": Operation("f32", ("u16",), _rounded(from_bf16)),
    "cvt.rn.f16.f32": Operation("u16", ("f32",), to_f16),
    "cvt.rn.bf16.f32": Operation("u16", ("f32",), to_bf16),
    "cvt.rn.f16x2.f32": Operation("u32", ("f32", "f32"), lambda a, b: _pack(to_f16(a), to_f16(b))),
    "cvt.rn.bf16x2.f32": Operation(
        "u32", ("f32", "f32"), lambda a, b: _pack(to_bf16(a), to_bf16(b))
    ),
}
"""By opcode with all modifiers. What is missing is refused, ``.ftz`` and ``.approx`` too."""
