"""What megatron-core needs to run without CUDA, in one place.

megatron-core asks for the current CUDA device and keeps its random states in CUDA generators even
when nothing is random. Here the device is the CPU and the states are the CPU generator's. Applied
only when the run has no CUDA device, and only to minor versions whose source was read for it.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import operator
from typing import Any

import torch

SUPPORTED_VERSIONS = ("0.16", "0.19")
"""Minor versions of megatron-core whose source was read for this module."""

_RANDOM = "megatron.core.tensor_parallel.random"


def _get_rng_state(
    device: object = "cpu", clone: bool = False, graph_safe: bool = False
) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(new_state: torch.Tensor, device: object = -1, graph_safe: bool = False) -> None:
    torch.set_rng_state(new_state)


def _add(self: Any, name: str, seed: int) -> None:
    """Make a tracker's named state from a seed; the generator itself stays as it is."""
    self._is_initialized = True
    self.states_[name] = torch.Generator(device="cpu").manual_seed(seed).get_state()


def _current_device() -> torch.device:
    return torch.device("cpu")


PATCHED = (
    (_RANDOM, "CudaRNGStatesTracker.add", _add),
    (_RANDOM, "_get_cuda_rng_state", _get_rng_state),
    (_RANDOM, "_set_cuda_rng_state", _set_rng_state),
    ("torch.cuda", "current_device", _current_device),
)
"""Names that :func:`apply` replaces, and by what."""


class _TorchOnCpu:
    """torch as megatron-core's schedules see it, whose counter of tokens names a CUDA device."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def zeros(self, *size: Any, **options: Any) -> torch.Tensor:
        return torch.zeros(*size, **{**options, "device": "cpu"})


def _cuda(self: torch.Tensor) -> torch.Tensor:
    """Leave a tied embedding where it is, which is moved before its copies are made equal."""
    return self


FOR_PIPELINES = (
    ("megatron.core.pipeline_parallel.schedules", "torch", _TorchOnCpu()),
    ("torch", "Tensor.cuda", _cuda),
)
"""What a pipeline of several stages needs besides."""


def apply(*, pipelines: bool = False) -> None:
    """Make megatron-core run on the CPU in this process, for good.

    Its communication between stages must not be told to wait for CUDA: ``batch_p2p_sync=False``.

    Args:
        pipelines: whether there are several stages.

    Raises:
        RuntimeError: a minor version that is not known, or a name to replace is gone.
    """
    version = importlib.metadata.version("megatron-core")
    if version.rpartition(".")[0] not in SUPPORTED_VERSIONS:
        known = " or ".join(f"megatron-core=={number}.*" for number in SUPPORTED_VERSIONS)
        raise RuntimeError(
            f"megatron-core {version}: the CPU support was not written for it; install {known}"
        )
    for module, name, ours in (*PATCHED, *(FOR_PIPELINES if pipelines else ())):
        owner, _, attribute = name.rpartition(".")
        place = importlib.import_module(module)
        place = operator.attrgetter(owner)(place) if owner else place
        if not hasattr(place, attribute):
            raise RuntimeError(f"megatron-core {version}: {module}.{name} is gone")
        setattr(place, attribute, ours)
    # A tracker warns of every draw from the CPU's generator, which here is its own.
    logging.getLogger(_RANDOM).setLevel(logging.ERROR)
