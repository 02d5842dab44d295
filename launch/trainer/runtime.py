"""The process a rank trains in: device, libraries, process groups, and their end."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import os
import platform
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from configs.errors import ConfigError
from configs.schema import Point
from launch.trainer import megatron_cpu
from launch.trainer.ranks import Ranks
from launch.trainer.start_up import eager_imports, remember_cpu_info, spare_garbage_collector


@contextlib.contextmanager
def distributed(point: Point, ranks: Ranks) -> Iterator[torch.device]:
    """Set up device, seed and process groups; leave the groups when the run went well.

    After a failure the groups are left alone: waiting for the other ranks could take for ever, and
    the launcher ends them.

    Raises:
        ConfigError: the point asks for CUDA and there is none.
    """
    device = choose_device(point, ranks)
    if device.type == "cuda":
        make_deterministic()
    prepare_libraries(device)
    import deepspeed
    from megatron.core import parallel_state

    deepspeed.utils.logging.set_log_level_from_string("info")
    if device.type == "cpu":
        # Compiling it takes minutes, and gloo does the few collectives there are.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(
        dist_backend="gloo" if device.type == "cpu" else "nccl", auto_mpi_discovery=False
    )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=point.tp, create_gloo_process_groups=False
    )
    seed_everything(point.seed)
    yield device
    torch.distributed.barrier()
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


def choose_device(point: Point, ranks: Ranks) -> torch.device:
    """Take this rank's CUDA device, or the CPU.

    Raises:
        ConfigError: the point asks for CUDA and there is none, or too few.
    """
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if point.device == "cpu" or (point.device == "auto" and not num_devices):
        return torch.device("cpu")
    if ranks.local_rank >= num_devices:
        raise ConfigError(
            f"device = '{point.device}': rank {ranks.rank} needs CUDA device {ranks.local_rank}, "
            f"and there are {num_devices}; use fewer ranks or device = 'cpu'"
        )
    device = torch.device("cuda", ranks.local_rank)
    torch.cuda.set_device(device)
    return device


def make_deterministic() -> None:
    """Choose CUDA kernels that give the same bits in every run: engines are compared bit by bit.

    An operation without such a kernel warns. Must come before the first matrix product.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    # The flag would also fill every new buffer with NaN, which costs time and protects nothing.
    deterministic: Any = torch.utils.deterministic
    deterministic.fill_uninitialized_memory = False


def prepare_libraries(device: torch.device) -> None:
    """Import megatron-core and DeepSpeed for the device, and quiet what says nothing here."""
    os.environ["DS_ACCELERATOR"] = device.type
    # Apex and Transformer Engine are missing, which megatron-core says ten times.
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core")
    # DeepSpeed calls a name that newer torch renames; one warning a bucket would fill the log.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    remember_cpu_info()
    with eager_imports():
        if device.type == "cpu":
            megatron_cpu.apply()
        for module in ("megatron.core.models.gpt", "deepspeed.runtime.zero.muon.muon_optimizer"):
            importlib.import_module(module)
    spare_garbage_collector()


def seed_everything(seed: int) -> None:
    """Make weights and order the same in every run and for every data-parallel degree."""
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)


def versions() -> dict[str, str]:
    """Versions of what decides the numbers."""
    names = ("torch", "deepspeed", "megatron-core", "numpy")
    found = {name: importlib.metadata.version(name) for name in names}
    return {"python": platform.python_version(), **found}
