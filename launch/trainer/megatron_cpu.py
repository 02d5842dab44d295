"""What megatron-core needs to run without CUDA, in one place.

megatron-core asks for the current CUDA device and keeps its random states in CUDA generators even
when nothing is random. Here the device is the CPU and the states are the CPU generator's. Applied
only when the run has no CUDA device; the patched names are checked against the one minor version
they were written for.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
from collections.abc import Iterator
from typing import Any

import torch

SUPPORTED_VERSION = "0.16"
"""Minor version of megatron-core whose source was read for this module."""

_RANDOM = "megatron.core.tensor_parallel.random"
PATCHED = (
    (_RANDOM, "CudaRNGStatesTracker"),
    (_RANDOM, "_get_cuda_rng_state"),
    (_RANDOM, "_set_cuda_rng_state"),
    ("torch.cuda", "current_device"),
)
"""Names that :func:`apply` replaces."""


class CpuRngStatesTracker:
    """Named states of the CPU generator, with the interface of megatron-core's CUDA tracker."""

    def __init__(
        self, use_cudagraphable_rng: bool = False, is_inference_rng_tracker: bool = False
    ) -> None:
        self.use_cudagraphable_rng = use_cudagraphable_rng
        self.is_inference_rng_tracker = is_inference_rng_tracker
        self.reset()

    def is_initialized(self) -> bool:
        """Whether a state was added or set."""
        return bool(self.states_)

    def reset(self) -> None:
        """Forget every state."""
        self.states_: dict[str, torch.Tensor] = {}

    def get_states(self) -> dict[str, torch.Tensor]:
        """The states by name."""
        return dict(self.states_)

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        """Replace every state."""
        self.states_ = dict(states)

    def add(self, name: str, seed: int) -> None:
        """Make a state from a seed; the generator itself stays as it is."""
        generator = torch.Generator(device="cpu").manual_seed(seed)
        self.states_[name] = generator.get_state()

    @contextlib.contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        """Draw from the named state inside the context."""
        outer = torch.get_rng_state()
        torch.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = torch.get_rng_state()
            torch.set_rng_state(outer)


def verify() -> None:
    """Check that megatron-core is the version this module was written for.

    Raises:
        RuntimeError: another minor version, or a patched name is gone.
    """
    version = importlib.metadata.version("megatron-core")
    if not version.startswith(f"{SUPPORTED_VERSION}."):
        raise RuntimeError(
            f"megatron-core {version}: the CPU support was written for {SUPPORTED_VERSION}.x; "
            f"install megatron-core~={SUPPORTED_VERSION}.0"
        )
    for module, name in PATCHED:
        if not hasattr(importlib.import_module(module), name):
            raise RuntimeError(f"megatron-core {version}: {module}.{name} is gone")


def apply() -> None:
    """Make megatron-core run on the CPU in this process, for good.

    Raises:
        RuntimeError: see :func:`verify`.
    """
    verify()
    random: Any = importlib.import_module(_RANDOM)
    random.CudaRNGStatesTracker = CpuRngStatesTracker
    random._get_cuda_rng_state = _get_rng_state
    random._set_cuda_rng_state = _set_rng_state
    torch.cuda.current_device = _current_device  # type: ignore[assignment]


def _get_rng_state(
    device: object = "cpu", clone: bool = False, graph_safe: bool = False
) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(new_state: torch.Tensor, device: object = -1, graph_safe: bool = False) -> None:
    torch.set_rng_state(new_state)


def _current_device() -> torch.device:
    return torch.device("cpu")
