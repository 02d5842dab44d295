"""Launch a Triton kernel without a GPU: compiled as a launch would compile it, run as PTX."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
from ptx import Program, Region
from triton.backends.compiler import GPUTarget


class Target:
    """Tells Triton of a GPU of a compute capability; stands where its driver does."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_device(self) -> int:
        return self._capability  # Triton keeps what it compiled by device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)


class PtxKernel:
    """Takes the place of a ``triton.jit`` function; its tensors are on the host.

    Triton chooses the variant from the arguments, as in a launch: alignment of the addresses,
    divisibility of the integers, those that are 1. ``launches`` gets what it compiled.
    """

    def __init__(self, function: Any, launches: list[Any] | None = None) -> None:
        self._function = function
        self.launches: list[Any] = [] if launches is None else launches

    def __getitem__(self, grid: tuple[int]) -> functools.partial[None]:
        return functools.partial(self._launch, grid)

    def _launch(self, grid: tuple[int], *arguments: Any, **options: Any) -> None:
        compiled = self._function.run(*arguments, grid=grid, warmup=True, **options)
        self.launches.append(compiled)
        kinds = compiled.src.signature
        named = zip(self._function.arg_names, arguments, strict=False)
        passed = [value for name, value in named if kinds[name] != "constexpr"]
        tensors = [value for value in passed if isinstance(value, torch.Tensor)]
        regions = [Region(tensor.data_ptr(), _bytes(tensor)) for tensor in tensors]
        numbers = [v.data_ptr() if isinstance(v, torch.Tensor) else v for v in passed]
        program = _program(compiled.asm["ptx"])
        scratch = [0] * (len(program.parameters) - len(numbers))  # Triton's own, unused
        program.run(grid[0], [*numbers, *scratch], regions, compiled.metadata.shared)


def use_target(monkeypatch: Any, capability: int) -> None:
    """Let Triton compile for ``capability`` until the test ends."""
    monkeypatch.setattr(triton.runtime.driver, "_active", Target(capability))


@functools.lru_cache(maxsize=64)
def _program(text: str) -> Program:
    return Program(text)


def _bytes(tensor: torch.Tensor) -> Any:
    return tensor.view(torch.uint8).numpy()
