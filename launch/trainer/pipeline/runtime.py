"""The process a rank of a pipeline trains in: device, process groups, and their end."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from configs.schema import Point
from launch.trainer import megatron_cpu
from launch.trainer.ranks import Ranks
from launch.trainer.runtime import (
    choose_device,
    eager_imports,
    make_deterministic,
    seed_everything,
)

SEED_STEP = 100
"""What is added to the seed from stage to stage, as in Megatron: their weights must differ."""


@contextlib.contextmanager
def distributed(point: Point, ranks: Ranks) -> Iterator[torch.device]:
    """Set up device, seed and process groups; leave the groups when the run went well.

    After a failure the groups are left alone: waiting for the other ranks could take for ever, and
    the launcher ends them.

    Raises:
        ConfigError: the point asks for CUDA and there is none.
    """
    device = choose_device(point, ranks)
    # Apex and Transformer Engine are missing, which megatron-core says ten times.
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core")
    with eager_imports():
        if device.type == "cuda":
            make_deterministic()
        else:
            megatron_cpu.apply(pipelines=True)
        from megatron.core import parallel_state
        from megatron.core.models import gpt as _gpt  # noqa: F401 - its decorators run here
    dist.init_process_group("gloo" if device.type == "cpu" else "nccl")
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=point.tp,
        pipeline_model_parallel_size=point.pp,
        create_gloo_process_groups=False,
    )
    seed_everything(point.seed + SEED_STEP * parallel_state.get_pipeline_model_parallel_rank())
    yield device
    dist.barrier()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def process_groups() -> Any:  # noqa: ANN401 - megatron-core's ProcessGroupCollection
    """This rank's groups, as megatron-core's schedule takes them."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    return ProcessGroupCollection.use_mpu_process_groups()


def versions() -> dict[str, str]:
    """Versions of what decides the numbers."""
    names = ("torch", "megatron-core", "numpy")
    found = {name: importlib.metadata.version(name) for name in names}
    return {"python": platform.python_version(), **found}
