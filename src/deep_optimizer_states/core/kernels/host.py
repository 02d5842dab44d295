"""The host Adam kernel: built once with the C++ compiler, called without the GIL."""

from __future__ import annotations

import ctypes
import enum
import functools
import hashlib
import os
import platform
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from deep_optimizer_states.core.kernels.adam import AdamScalars, AdamTensors
from deep_optimizer_states.errors import KernelError

SOURCES = tuple(Path(__file__).with_name(name) for name in ("host_adam.cpp", "host_adam_chunk.inc"))
_FLAGS = (
    *("-std=c++17", "-O3", "-fopenmp", "-shared", "-fPIC"),
    # No contraction but the written one. The other two let square roots vectorise; no bit changes.
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
)
_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class InstructionSet(enum.IntEnum):
    """Instruction sets of the kernel; the bits are the same in each, the time is not."""

    PORTABLE = 0
    AVX2 = 1
    """With FMA."""
    AVX512 = 2
    SVE = 3
    """ARM's, where PORTABLE is NEON."""


@dataclass(frozen=True)
class Tail:
    """Rounding of a tensor's last elements, as DeepSpeed's CPUAdam was compiled.

    Attributes:
        width: Elements of a full vector; the last ``numel % width`` go through scalar code.
        mode: Contraction of that code: 0 as in the vectors, 1 ``m * beta1`` fused, 2 nothing fused.
    """

    width: int
    mode: int

    def start(self, numel: int) -> int:
        """Return the first element that scalar code handles; ``numel`` if there is none."""
        return numel - numel % self.width


class HostAdam:
    """Adam on host tensors, one pass: gradient in, state updated, 16-bit weights out.

    Args:
        tail_mode: Contraction of the last elements, see :class:`Tail`.
        instruction_set: One that this CPU has; its best by default.

    Raises:
        KernelError: No C++ compiler, the build failed, or the CPU lacks the instruction set.
    """

    def __init__(self, tail_mode: int, instruction_set: InstructionSet | None = None) -> None:
        best = best_instruction_set()
        self.instruction_set = best if instruction_set is None else instruction_set
        if self.instruction_set > best:
            raise KernelError(f"this CPU has no {self.instruction_set.name}, only {best.name}")
        self._tail_mode = tail_mode
        self._teams = TeamSizes()
        self._function = _load().dos_adam_step
        self._scalar_names = _load().dos_scalar_names().decode().split()

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
            num_threads: OpenMP threads at most. Fewer step a tile that is too small for them, or
                while other work holds their cores; see :class:`TeamSizes`.

        Raises:
            KernelError: A tensor has a type, device or layout that the kernel does not take.
        """
        numel = tensors.numel
        for name, tensor in vars(tensors).items():
            if tensor.numel() != numel or not tensor.is_contiguous() or not tensor.is_cpu:
                raise KernelError(
                    f"host Adam needs contiguous host tensors of {numel} elements; {name} is "
                    f"{tuple(tensor.shape)} on {tensor.device}"
                )
            if tensor.dtype not in _TYPES:
                raise KernelError(f"host Adam does not take {name} in {tensor.dtype}")
        if tensors.exp_avg.dtype != tensors.exp_avg_sq.dtype:
            raise KernelError(
                f"host Adam needs both moments in one type, not {tensors.exp_avg.dtype} and "
                f"{tensors.exp_avg_sq.dtype}"
            )
        if num_threads > 1:
            team = self._teams.choose(numel, num_threads)
            self._teams.learn(team, self._call(tensors, scalars, tail_start, team, probe=False))
        else:
            self._call(tensors, scalars, tail_start, 1, probe=False)

    def probe(self, tensors: AdamTensors, scalars: AdamScalars, num_threads: int) -> None:
        """Read and write what :meth:`step` does, nearly without arithmetic: what memory allows."""
        self._call(tensors, scalars, tensors.numel, num_threads, probe=True)

    def _call(
        self,
        tensors: AdamTensors,
        scalars: AdamScalars,
        tail_start: int,
        num_threads: int,
        probe: bool,
    ) -> float:
        values = np.array([getattr(scalars, name) for name in self._scalar_names], np.float32)
        waited_s: float = self._function(
            tensors.master.data_ptr(),
            tensors.grad.data_ptr(),
            tensors.exp_avg.data_ptr(),
            tensors.exp_avg_sq.data_ptr(),
            tensors.weights.data_ptr(),
            tensors.numel,
            tail_start,
            _TYPES[tensors.grad.dtype],
            _TYPES[tensors.weights.dtype],
            self._tail_mode,
            values.ctypes.data,
            num_threads,
            self.instruction_set,
            probe,
            _TYPES[tensors.master.dtype],
            _TYPES[tensors.exp_avg.dtype],
        )
        return waited_s


def best_instruction_set() -> InstructionSet:
    """Return the best that this CPU has.

    Raises:
        KernelError: No C++ compiler, or the build failed.
    """
    return InstructionSet(_load().dos_best_set())


@functools.cache
def _load() -> ctypes.CDLL:
    path = build()
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise KernelError(
            f"the host Adam kernel cannot be loaded: {error}; delete {path}, or name a folder in "
            "TORCH_EXTENSIONS_DIR from which programs may run"
        ) from error
    library.dos_adam_step.restype = ctypes.c_double
    library.dos_adam_step.argtypes = [
        *[ctypes.c_void_p] * 5,
        *[ctypes.c_int64] * 2,
        *[ctypes.c_int] * 3,
        ctypes.c_void_p,
        *[ctypes.c_int] * 5,
    ]
    library.dos_best_set.restype = ctypes.c_int
    library.dos_scalar_names.restype = ctypes.c_char_p
    return library


def build() -> Path:
    """Compile the kernel unless a build of the same source, flags and kind of machine is there.

    Builds land in ``$TORCH_EXTENSIONS_DIR`` (torch's own folder for compiled extensions) and take
    about a second. Processes that build at once do not disturb each other.

    Returns:
        The shared library.

    Raises:
        KernelError: No compiler, it failed (holds its messages), or the folder takes no files.
    """
    compiler = os.environ.get("CXX", "c++")
    target = build_folder() / f"host_adam-{_build_key(compiler)}.so"
    try:
        if not target.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=target.parent) as folder:
                fresh = Path(folder) / target.name
                _compile(compiler, fresh)
                fresh.replace(target)
    except OSError as error:
        raise KernelError(
            f"the host Adam kernel cannot be built in {target.parent}: {error.strerror}; make room "
            "there, or name another folder in TORCH_EXTENSIONS_DIR"
        ) from error
    return target


def _compile(compiler: str, target: Path) -> None:
    command = [compiler, *_FLAGS, str(SOURCES[0]), "-o", str(target)]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except OSError as error:
        raise KernelError(
            f"the host Adam kernel cannot be built with '{compiler}': {error.strerror}; install a "
            "C++ compiler, or name one in CXX"
        ) from error
    except subprocess.CalledProcessError as error:
        raise KernelError(
            f"'{compiler}' failed on the host Adam kernel:\n{error.stderr.strip()}"
        ) from error


def build_folder() -> Path:
    """Return the kernel's folder among those of torch's compiled extensions."""
    root = os.environ.get("TORCH_EXTENSIONS_DIR")
    base = Path(root) if root else Path.home() / ".cache" / "torch_extensions"
    return base / "deep_optimizer_states"


def _build_key(compiler: str) -> str:
    parts = (*(path.read_text() for path in SOURCES), *_FLAGS, compiler, platform.machine())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


LEAST_PER_THREAD = 2**16
"""Elements, as many as the kernel deals out at a time. One thread steps them in about 70 us;
forming and ending a team takes a few."""
_SECONDS_PER_ELEMENT = 1e-9
"""One thread: 28 bytes of memory traffic at about 28 GB/s. Only the magnitude matters."""
_NEWEST = 0.25
"""Weight of the newest wait in the average, so that a single interrupt changes little."""
_FADING = 0.98
"""Factor by which a wait is forgotten with every tile that a team of another size steps."""


class TeamSizes:
    """Chooses the team for each tile from how long teams of each size have waited for a member.

    A team is done when its last member is. A member whose core runs something else comes back after
    a turn of the scheduler, which is milliseconds, and everyone waits. A large tile gains more than
    that by a team even so, a small one does not. Sizes that lose are tried again now and then,
    because their wait fades: when the cores are free again, the team is back.
    """

    def __init__(self) -> None:
        self._wait_s: dict[int, float] = {}

    def choose(self, numel: int, num_threads: int) -> int:
        """Halve ``num_threads`` until the tile is large enough for the team.

        Returns:
            Threads, from 1 to ``num_threads``.
        """
        team = num_threads
        while team > 1:
            # Half the team would take twice as long, and so longer by this.
            gained_s = numel * _SECONDS_PER_ELEMENT / team
            if numel >= team * LEAST_PER_THREAD and gained_s >= self._wait_s.get(team, 0.0):
                break
            team //= 2
        return team

    def learn(self, team: int, wait_s: float) -> None:
        """Note how long a team's first thread waited for the others after its own last element."""
        for size, average in self._wait_s.items():
            self._wait_s[size] = average * _FADING if size != team else average
        average = self._wait_s.get(team, 0.0)
        self._wait_s[team] = average + _NEWEST * (wait_s - average)
