"""The host Adam kernel: built once with the C++ compiler, called without the GIL."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from deep_optimizer_states.errors import KernelError
from deep_optimizer_states.kernels.scalars import AdamScalars
from deep_optimizer_states.kernels.tensors import AdamTensors

_SOURCE = Path(__file__).with_name("host_adam.cpp")
_FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC"),
    # No contraction but the written one. The other two let square roots vectorise; no bit changes.
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
)
_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_NARROW = ("grad", "weights")


@dataclass(frozen=True)
class Tail:
    """How DeepSpeed's CPUAdam was compiled: what it does with the last elements of a tensor.

    Attributes:
        width: Elements of a full vector; the last ``numel % width`` go through scalar code.
        mode: Contraction of that code: 0 as in the vectors, 1 ``m * beta1`` fused, 2 nothing fused.
    """

    width: int
    mode: int

    def start(self, numel: int) -> int:
        """First element that scalar code handles; ``numel`` if there is none."""
        return numel - numel % self.width


class HostAdam:
    """Adam on host tensors, one pass: gradient in, state updated, 16-bit weights out.

    Args:
        tail_mode: Contraction of the last elements, see :class:`Tail`.

    Raises:
        KernelError: No C++ compiler, or the build failed.
    """

    def __init__(self, tail_mode: int) -> None:
        self._tail_mode = tail_mode
        self._function = _load()

    def step(
        self,
        tensors: AdamTensors,  # on the host
        scalars: AdamScalars,
        tail_start: int,
        num_threads: int,
    ) -> None:
        """Step a subgroup or a tile of it. Releases the GIL while it runs.

        Args:
            tensors: What to update.
            scalars: Adam's scalars.
            tail_start: First element rounded as a tail; ``numel`` if none is.
            num_threads: OpenMP threads.

        Raises:
            KernelError: A tensor has a type, device or layout that the kernel does not take.
        """
        numel = tensors.numel
        for name, tensor in vars(tensors).items():
            if tensor.numel() != numel or not tensor.is_contiguous() or tensor.is_cuda:
                raise KernelError(
                    f"host Adam needs contiguous host tensors of {numel} elements; {name} is "
                    f"{tuple(tensor.shape)} on {tensor.device}"
                )
            if tensor.dtype not in _TYPES or (tensor.dtype.itemsize < 4 and name not in _NARROW):
                raise KernelError(f"host Adam does not take {name} in {tensor.dtype}")
        values = scalars.as_array()
        self._function(
            tensors.master.data_ptr(),
            tensors.grad.data_ptr(),
            tensors.exp_avg.data_ptr(),
            tensors.exp_avg_sq.data_ptr(),
            tensors.weights.data_ptr(),
            numel,
            tail_start,
            _TYPES[tensors.grad.dtype],
            _TYPES[tensors.weights.dtype],
            self._tail_mode,
            values.ctypes.data,
            num_threads,
        )


@functools.cache
def _load() -> Any:  # noqa: ANN401 - ctypes has no public type for a foreign function
    function = ctypes.CDLL(str(build())).dos_adam_step
    function.restype = None
    function.argtypes = [
        *[ctypes.c_void_p] * 5,
        *[ctypes.c_int64] * 2,
        *[ctypes.c_int] * 3,
        ctypes.c_void_p,
        ctypes.c_int,
    ]
    return function


def build() -> Path:
    """Compile the kernel unless a build of the same source, flags and machine is there.

    Builds land in ``$TORCH_EXTENSIONS_DIR`` (torch's own folder for compiled extensions) and take
    about a second. Processes that build at once do not disturb each other.

    Returns:
        The shared library.

    Raises:
        KernelError: No compiler, or it failed; holds its messages.
    """
    compiler = os.environ.get("CXX", "c++")
    target = _build_folder() / f"host_adam-{_build_key(compiler)}.so"
    if target.is_file():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            fresh = Path(folder) / target.name
            command = [compiler, *_FLAGS, str(_SOURCE), "-o", str(fresh)]
            subprocess.run(command, check=True, capture_output=True, text=True)
            fresh.replace(target)
    except OSError as error:
        raise KernelError(
            f"cannot build the host Adam kernel with '{compiler}' into {target.parent}: {error}; "
            "install a C++ compiler, or name one in CXX"
        ) from error
    except subprocess.CalledProcessError as error:
        raise KernelError(
            f"'{compiler}' failed on the host Adam kernel:\n{error.stderr.strip()}"
        ) from error
    return target


def _build_folder() -> Path:
    root = os.environ.get("TORCH_EXTENSIONS_DIR")
    base = Path(root) if root else Path.home() / ".cache" / "torch_extensions"
    return base / "deep_optimizer_states"


def _build_key(compiler: str) -> str:
    # -march=native: a library built for one CPU must not be picked up on another that shares $HOME.
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(errors="replace").splitlines() if cpuinfo.is_file() else []
    cpu = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    parts = (_SOURCE.read_text(), *_FLAGS, compiler, platform.machine(), cpu)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
