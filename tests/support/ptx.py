"""Run compiled PTX on the CPU: for straight-line kernels, all threads of the grid in lockstep.

What the kernels under test do not use is refused with the line that uses it: branches, unknown
opcodes and modifiers, registers without a value, special registers besides the two below.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import numpy as np
import ptx_memory
from ptx_memory import Access, MemoryFault, Region
from ptx_operations import OPERATIONS, TYPES

Array = np.ndarray[Any, np.dtype[Any]]

_ACCESS = re.compile(
    r"(ld|st)\.(global|shared|param)(?:(?<=shared)::cta)?(?:\.v([24]))?\.([bsu])(16|32|64)"
)
_MOVE = re.compile(r"mov\.[bu](16|32|64)")
_INSTRUCTION = re.compile(r"(?:@(!?)(%p\d+)\s+)?([a-z][\w.:]*)\s*(.*);")
_OPERAND = re.compile(r"\{[^}]*\}|\[[^]]*\]|[^\s,]+")
_IGNORED = re.compile(r"(\.loc|\.reg)\s.*|\$?\w+:")


class PtxError(Exception):
    """PTX that this module does not run; names line and cause."""


class Instruction(NamedTuple):
    """One line: ``@guard opcode operands``."""

    line: str
    guard: str | None
    negated: bool
    opcode: str
    operands: tuple[str, ...]


class Program:
    """A kernel of one ``.entry``.

    Args:
        text: PTX.

    Raises:
        PtxError: A line that is no instruction.
    """

    def __init__(self, text: str) -> None:
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

    def run(
        self, grid: int, arguments: list[int | float], regions: list[Region], shared_bytes: int
    ) -> None:
        """Launch.

        Args:
            grid: Blocks.
            arguments: A number or an address for each parameter.
            regions: The arrays it may touch.
            shared_bytes: Shared memory of a block.

        Raises:
            PtxError: It does something that is not known here, or a GPU would not do.
        """
        launch = _Launch(self, grid, arguments, regions, shared_bytes)
        for instruction in self.instructions:
            try:
                with np.errstate(all="ignore"):
                    launch.execute(instruction)
            except (PtxError, MemoryFault) as error:
                raise PtxError(f"{instruction.line}: {error}") from error


def _parse(number: int, line: str) -> Instruction | None:
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

    def __init__(
        self,
        program: Program,
        grid: int,
        arguments: list[int | float],
        regions: list[Region],
        shared_bytes: int,
    ) -> None:
        self._program, self._regions = program, regions
        self._threads = np.arange(grid * program.block_size)
        self._block = self._threads // program.block_size
        self._shared_bytes = shared_bytes
        self._shared = Region(0, np.zeros(grid * shared_bytes, dtype=np.uint8))
        self._barriers = 0
        self._registers: dict[str, Array] = {}
        self._parameters = {
            # A conversion that wraps: signed numbers are declared as unsigned.
            name: np.array([value]).astype(TYPES[kind]).view(np.uint8)
            for (kind, name), value in zip(program.parameters, arguments, strict=True)
        }

    def execute(self, instruction: Instruction) -> None:
        opcode, operands = instruction.opcode, instruction.operands
        active = self._active(instruction)
        if opcode in OPERATIONS:
            self._compute(opcode, operands, active)
        elif found := _ACCESS.fullmatch(opcode):
            what, space, count, kind, bits = found.groups()
            move = self._load if what == "ld" else self._store
            move(space, kind.replace("b", "u") + bits, int(count or 1), operands, active)
        elif _MOVE.fullmatch(opcode):
            self._move(int(opcode[-2:]), operands, active)
        elif opcode == "bar.sync" and operands == ("0",) and active.all():
            self._barriers += 1
        elif opcode != "ret" or not active.all():
            raise PtxError("unknown instruction")

    def _active(self, instruction: Instruction) -> Array:
        if instruction.guard is None:
            return np.ones(len(self._threads), dtype=bool)
        return self._register(instruction.guard, 1) ^ instruction.negated

    def _compute(self, opcode: str, operands: tuple[str, ...], active: Array) -> None:
        result, kinds, apply = OPERATIONS[opcode]
        if len(operands) != 1 + len(kinds):
            raise PtxError(f"{len(kinds)} sources expected")
        sources = [self._typed(name, kind) for name, kind in zip(operands[1:], kinds, strict=True)]
        found = apply(*sources)
        if result != "pred":
            bits = _bits(result)
            found = np.ascontiguousarray(found).view(TYPES[f"u{bits}"]).reshape(-1)
        self._write(operands[0], found, active)

    def _typed(self, operand: str, kind: str) -> Array:
        values = self._value(operand, _bits(kind))
        if kind == "f32x2":
            return values.view(np.float32).reshape(-1, 2)
        return values if kind == "pred" else values.view(TYPES[kind])

    def _move(self, bits: int, operands: tuple[str, ...], active: Array) -> None:
        """Copy, and split or join."""
        names = _names(operands[0])
        pieces = self._joined(operands[1], bits).view(TYPES[f"u{bits // len(names)}"])
        for name, piece in zip(names, pieces.T, strict=True):
            self._write(name, piece, active)

    def _joined(self, operand: str, bits: int) -> Array:
        """Bytes of registers, shape (threads, size); the first has the lowest."""
        names = _names(operand)
        values = [self._value(name, bits // len(names)) for name in names]
        return np.stack(values, axis=1).view(np.uint8)

    def _load(
        self, space: str, kind: str, count: int, operands: tuple[str, ...], active: Array
    ) -> None:
        """To registers as wide, or wider: numbers are extended."""
        size = count * _bits(kind) // 8
        data = np.zeros((len(self._threads), size), dtype=np.uint8)
        if space == "param":
            data[:] = self._parameters[operands[1].strip("[]")]
        elif active.any():
            region, access = self._locate(space, size, operands[1], active)
            data[active] = region.load(access)
        for name, piece in zip(_names(operands[0]), data.view(TYPES[kind]).T, strict=True):
            width = self._width(name)
            self._write(
                name, piece.astype(TYPES[f"{kind[0]}{width}"]).view(f"u{width // 8}"), active
            )

    def _store(
        self, space: str, kind: str, count: int, operands: tuple[str, ...], active: Array
    ) -> None:
        size = count * _bits(kind) // 8
        if active.any():
            region, access = self._locate(space, size, operands[0], active)
            region.store(access, self._joined(operands[1], size * 8)[active])

    def _locate(self, space: str, size: int, operand: str, active: Array) -> tuple[Region, Access]:
        base, _, plus = operand.strip("[] ").partition("+")
        addresses = self._value(base.strip(), 64 if space == "global" else 32).astype(np.int64)
        addresses = addresses[active] + int(plus or 0)
        regions = self._regions
        if space == "shared":
            if (addresses < 0).any() or (addresses + size > self._shared_bytes).any():
                raise PtxError("outside of shared memory")
            addresses += self._block[active] * self._shared_bytes
            regions = [self._shared]
        block_size, threads = self._program.block_size, self._threads[active]
        access = Access(addresses, size, threads, block_size, self._barriers)
        return ptx_memory.find(regions, access), access

    def _value(self, operand: str, bits: int) -> Array:
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

    def _width(self, name: str) -> int:
        return self._program.widths[name.rstrip("0123456789")]

    def _register(self, name: str, bits: int) -> Array:
        if name not in self._registers:
            raise PtxError(f"{name} has no value")
        if self._width(name) != bits:
            raise PtxError(f"{name} has not {bits} bits")
        return self._registers[name]

    def _write(self, name: str, values: Array, active: Array) -> None:
        if self._width(name) != max(1, values.dtype.itemsize * 8 * (values.dtype != bool)):
            raise PtxError(f"{name} has another width")
        if not active.all():
            values = np.where(active, values, self._register(name, self._width(name)))
        self._registers[name] = values


def _bits(kind: str) -> int:
    return {"pred": 1, "f32x2": 64}.get(kind) or TYPES[kind].itemsize * 8


def _names(operand: str) -> list[str]:
    return [name.strip() for name in operand.strip("{}").split(",")]
