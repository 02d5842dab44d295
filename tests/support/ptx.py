"""Run Triton's compiled kernels on the CPU: straight-line PTX, the grid's threads in lockstep.

What the kernels under test do not use is refused with the line that uses it: branches, unknown
opcodes and modifiers, registers without a value, special registers besides the two below. That
threads of a block wait for one another where they must is left to Triton.

Numbers are those of IEEE 754 in hardware: numpy's fp32 product, quotient and square root are
rounded once, to nearest even, and keep subnormal numbers. Only fused multiply-adds are put
together here. As on a GPU, a result that is not a number has one pattern of bits, whatever the
operands had.
"""

import functools
import re
from typing import NamedTuple

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget

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
    sources: tuple
    apply: callable


def fused_multiply_add(a, b, c):
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


def _wide(values):
    """As fp64, infinity as the number after the largest of fp32: rounding treats it as that."""
    return np.clip(values.astype(np.float64), -(2.0**128), 2.0**128)


def to_bf16(values):
    """Bits of fp32 numbers rounded to bf16, to nearest even."""
    bits = values.view(np.uint32)
    kept, dropped = bits >> np.uint32(16), bits & np.uint32(0xFFFF)
    half = np.uint32(0x8000)
    up = (dropped > half) | ((dropped == half) & (kept % 2 == 1))
    return np.where(np.isnan(values), _NAN_16, (kept + up).astype(np.uint16))


def to_f16(values):
    """Bits of fp32 numbers rounded to fp16, to nearest even."""
    return np.where(np.isnan(values), _NAN_16, values.astype(np.float16).view(np.uint16))


def from_bf16(bits):
    """The fp32 numbers that bf16 bits stand for."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _pack(high, low):
    return high.astype(np.uint32) << np.uint32(16) | low


def _shift_left(values, count):
    width = values.dtype.itemsize * 8
    shifted = values << np.minimum(count, width - 1).astype(values.dtype)
    return np.where(count < width, shifted, 0).astype(values.dtype)


def _rounded(function):
    def apply(*values):
        found = function(*values)
        return np.where(np.isnan(found), _NAN_32.view(np.float32), found)

    return apply


def _same(kind, sources, apply):
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
    "mul.wide.s32": Operation("s64", ("s32", "s32"), lambda a, b: a.astype(np.int64) * b),
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


class PtxError(Exception):
    """PTX that this module does not run, or an access that a GPU would refuse."""


class Region:
    """An array of uint8 behind an address: memory that a kernel may touch."""

    def __init__(self, base, data):
        self._base, self._data = base, data

    def holds(self, addresses, size):
        """Return whether all bytes are of this array; ``size`` is that of each thread's access."""
        first = addresses - self._base
        return bool(((first >= 0) & (first + size <= self._data.size)).all())

    def load(self, addresses, size):
        """Return bytes, shape (threads, size)."""
        return self._data[self._at(addresses, size)]

    def store(self, addresses, values):
        """Write ``values``, shape (threads, size)."""
        at = self._at(addresses, values.shape[1])
        if len(np.unique(at)) < at.size:
            raise PtxError("threads race for an address")
        self._data[at] = values

    def _at(self, addresses, size):
        return (addresses - self._base)[:, None] + np.arange(size)


# Programs.

_ACCESS = re.compile(
    r"(ld|st)\.(global|shared|param)(?:(?<=shared)::cta)?(?:\.v([24]))?\.([bsuf])(16|32|64)"
)
_MOVE = re.compile(r"mov\.[bsuf](16|32|64)")
_INSTRUCTION = re.compile(r"(?:@(!?)(%p\d+)\s+)?([a-z][\w.:]*)\s*(.*);")
_OPERAND = re.compile(r"\{[^}]*\}|\[[^]]*\]|[^\s,]+")
_IGNORED = re.compile(r"(\.loc|\.reg)\s.*|\$?\w+:")


class Instruction(NamedTuple):
    """One line: ``@guard opcode operands``."""

    line: str
    guard: str | None
    negated: bool
    opcode: str
    operands: tuple


class Program:
    """A kernel of one ``.entry``; a line that is no instruction raises :class:`PtxError`."""

    def __init__(self, text):
        head, _, rest = text.partition("\n{\n")
        lines = rest.partition("\n}\n")[0].split("\n")
        self.parameters = re.findall(r"\.param \.([uf]\d+)[^,)]* (\w+)", head)
        found = re.search(r"\.reqntid (\d+)", head)
        if found is None:
            raise PtxError("no .reqntid: how many threads has a block?")
        self.block_size = int(found[1])
        self.shared = re.findall(r"\.extern \.shared \.align 16 \.b8 (\w+)\[\]", head)
        registers = (re.search(r"\.reg \.(\w+)\s+(%\w+)<", line) for line in lines)
        self.widths = {m[2]: 1 if m[1] == "pred" else int(m[1][1:]) for m in registers if m}
        numbered = enumerate(lines, start=head.count("\n") + 3)
        parsed = (_parse(number, line.partition("//")[0].strip()) for number, line in numbered)
        self.instructions = [instruction for instruction in parsed if instruction]

    def run(self, grid, arguments, regions, shared_bytes):
        """Launch a grid of so many blocks; an argument is a number or an address.

        Raises:
            PtxError: It does something that is not known here, or a GPU would not do.
        """
        launch = _Launch(self, grid, arguments, regions, shared_bytes)
        for instruction in self.instructions:
            try:
                with np.errstate(all="ignore"):
                    launch.execute(instruction)
            except PtxError as error:
                raise PtxError(f"{instruction.line}: {error}") from error


def _parse(number, line):
    if not line or _IGNORED.fullmatch(line):
        return None
    found = _INSTRUCTION.fullmatch(line)
    if found is None:
        raise PtxError(f"line {number}: {line}: no instruction")
    negated, guard, opcode, operands = found.groups()
    parts = tuple(_OPERAND.findall(operands))
    return Instruction(f"line {number}: {line}", guard, bool(negated), opcode, parts)


class _Launch:
    """Registers and memory of a grid; a register is an array with one number a thread."""

    def __init__(self, program, grid, arguments, regions, shared_bytes):
        self._program, self._regions = program, regions
        self._threads = np.arange(grid * program.block_size)
        self._block = self._threads // program.block_size
        self._shared_bytes = shared_bytes
        self._shared = Region(0, np.zeros(grid * shared_bytes, dtype=np.uint8))
        self._registers = {}
        self._parameters = {
            # A conversion that wraps: signed numbers are declared as unsigned.
            name: np.array([value]).astype(TYPES[kind]).view(np.uint8)
            for (kind, name), value in zip(program.parameters, arguments, strict=True)
        }

    def execute(self, instruction):
        opcode, operands = instruction.opcode, instruction.operands
        active = self._active(instruction)
        if opcode in OPERATIONS:
            self._compute(opcode, operands, active)
        elif found := _ACCESS.fullmatch(opcode):
            what, space, count, kind, bits = found.groups()
            move = self._load if what == "ld" else self._store
            move(space, re.sub("[bf]", "u", kind) + bits, int(count or 1), operands, active)
        elif _MOVE.fullmatch(opcode):
            self._move(int(opcode[-2:]), operands, active)
        elif (opcode, *operands) not in (("ret",), ("bar.sync", "0")) or not active.all():
            raise PtxError("unknown instruction")

    def _active(self, instruction):
        if instruction.guard is None:
            return np.ones(len(self._threads), dtype=bool)
        return self._register(instruction.guard, 1) ^ instruction.negated

    def _compute(self, opcode, operands, active):
        result, kinds, apply = OPERATIONS[opcode]
        if len(operands) != 1 + len(kinds):
            raise PtxError(f"{len(kinds)} sources expected")
        sources = [self._typed(name, kind) for name, kind in zip(operands[1:], kinds, strict=True)]
        found = apply(*sources)
        if result != "pred":
            bits = _bits(result)
            found = np.ascontiguousarray(found).view(TYPES[f"u{bits}"]).reshape(-1)
        self._write(operands[0], found, active)

    def _typed(self, operand, kind):
        values = self._value(operand, _bits(kind))
        if kind == "f32x2":
            return values.view(np.float32).reshape(-1, 2)
        return values if kind == "pred" else values.view(TYPES[kind])

    def _move(self, bits, operands, active):
        """Copy, and split or join."""
        names = _names(operands[0])
        pieces = self._joined(operands[1], bits).view(TYPES[f"u{bits // len(names)}"])
        for name, piece in zip(names, pieces.T, strict=True):
            self._write(name, piece, active)

    def _joined(self, operand, bits):
        """Bytes of registers, shape (threads, size); the first has the lowest."""
        names = _names(operand)
        values = [self._value(name, bits // len(names)) for name in names]
        return np.stack(values, axis=1).view(np.uint8)

    def _load(self, space, kind, count, operands, active):
        """To registers as wide, or wider: numbers are extended."""
        size = count * _bits(kind) // 8
        data = np.zeros((len(self._threads), size), dtype=np.uint8)
        if space == "param":
            data[:] = self._parameters[operands[1].strip("[]")]
        elif active.any():
            region, addresses = self._locate(space, size, operands[1], active)
            data[active] = region.load(addresses, size)
        for name, piece in zip(_names(operands[0]), data.view(TYPES[kind]).T, strict=True):
            width = self._width(name)
            self._write(
                name, piece.astype(TYPES[f"{kind[0]}{width}"]).view(f"u{width // 8}"), active
            )

    def _store(self, space, kind, count, operands, active):
        size = count * _bits(kind) // 8
        if active.any():
            region, addresses = self._locate(space, size, operands[0], active)
            region.store(addresses, self._joined(operands[1], size * 8)[active])

    def _locate(self, space, size, operand, active):
        base, _, plus = operand.strip("[] ").partition("+")
        addresses = self._value(base.strip(), 64 if space == "global" else 32).astype(np.int64)
        addresses = addresses[active] + int(plus or 0)
        regions = self._regions
        if space == "shared":
            if (addresses < 0).any() or (addresses + size > self._shared_bytes).any():
                raise PtxError("outside of shared memory")
            addresses += self._block[active] * self._shared_bytes
            regions = [self._shared]
        if (addresses % size != 0).any():
            raise PtxError(f"misaligned access of {size} bytes")
        for region in regions:
            if region.holds(addresses, size):
                return region, addresses
        raise PtxError("access outside of every array")

    def _value(self, operand, bits):
        special = {"%tid.x": self._threads % self._program.block_size, "%ctaid.x": self._block}
        dtype = TYPES[f"u{bits}"] if bits > 1 else np.dtype(bool)
        if operand in special:
            return special[operand].astype(dtype)
        if operand in self._program.shared:
            return np.zeros(len(self._threads), dtype)
        if operand.startswith("%"):
            return self._register(operand, bits)
        literal = int(operand[2:], 16) if operand.startswith("0f") else int(operand, 0)
        return np.full(len(self._threads), literal % 2**bits, dtype)

    def _width(self, name):
        return self._program.widths[name.rstrip("0123456789")]

    def _register(self, name, bits):
        if name not in self._registers:
            raise PtxError(f"{name} has no value")
        if self._width(name) != bits:
            raise PtxError(f"{name} has not {bits} bits")
        return self._registers[name]

    def _write(self, name, values, active):
        if self._width(name) != max(1, values.dtype.itemsize * 8 * (values.dtype != bool)):
            raise PtxError(f"{name} has another width")
        if not active.all():
            values = np.where(active, values, self._register(name, self._width(name)))
        self._registers[name] = values


def _bits(kind):
    return {"pred": 1, "f32x2": 64}.get(kind) or TYPES[kind].itemsize * 8


def _names(operand):
    return [name.strip() for name in operand.strip("{}").split(",")]


# Launches: compiled as a launch would compile, and run here.


class Target:
    """Tells Triton of a GPU of a compute capability; stands where its driver does."""

    def __init__(self, capability):
        self._capability = capability

    def get_current_device(self):
        return self._capability  # Triton keeps what it compiled by device

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", self._capability, 32)


class PtxKernel:
    """Takes the place of a ``triton.jit`` function; its tensors are on the host.

    Triton chooses the variant from the arguments, as in a launch: alignment of the addresses,
    divisibility of the integers, those that are 1. ``launches`` gets what it compiled.
    """

    def __init__(self, function, launches=None):
        self._function = function
        self.launches = [] if launches is None else launches

    def __getitem__(self, grid):
        return functools.partial(self._launch, grid)

    def _launch(self, grid, *arguments, **options):
        compiled = self._function.run(*arguments, grid=grid, warmup=True, **options)
        self.launches.append(compiled)
        kinds = compiled.src.signature
        names = self._function.arg_names
        given = {**dict(zip(names, arguments, strict=False)), **options}
        passed = [given[name] for name in names if kinds[name] != "constexpr"]
        tensors = [value for value in passed if isinstance(value, torch.Tensor)]
        regions = [Region(tensor.data_ptr(), _bytes(tensor)) for tensor in tensors]
        numbers = [v.data_ptr() if isinstance(v, torch.Tensor) else v for v in passed]
        program = _program(compiled.asm["ptx"])
        scratch = [0] * (len(program.parameters) - len(numbers))  # Triton's own, unused
        program.run(grid[0], [*numbers, *scratch], regions, compiled.metadata.shared)


def use_target(monkeypatch, capability):
    """Let Triton compile for ``capability`` until the test ends."""
    driver = triton.runtime.driver
    name = "_active" if hasattr(driver, "_active") else "active"  # the latter before Triton 3.4
    monkeypatch.setattr(driver, name, Target(capability))


@functools.lru_cache(maxsize=64)
def _program(text):
    return Program(text)


def _bytes(tensor):
    return tensor.view(torch.uint8).numpy()
