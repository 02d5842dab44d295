"""The process a rank trains in: device, libraries, process groups, and their end."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from configs.errors import ConfigError
from configs.schema import Point
from launch.train_loop import megatron_cpu
from launch.train_loop.runfile import Ranks, RunFile

SEED_STEP = 100
"""What is added to the seed from stage to stage, as in Megatron: their weights must differ."""


@contextlib.contextmanager
def distributed(
    point: Point, ranks: Ranks, *, with_deepspeed: bool = True
) -> Iterator[torch.device]:
    """Set up device, seed and process groups; leave the groups when the run went well.

    After a failure the groups are left alone: waiting for the other ranks could take for ever, and
    the launcher ends them. Without DeepSpeed the ranks may be stages of a pipeline.

    Raises:
        ConfigError: the point asks for CUDA and there is none.
    """
    device = choose_device(point, ranks)
    backend = "gloo" if device.type == "cpu" else "nccl"
    # Apex and Transformer Engine are missing, which megatron-core says ten times.
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core")
    with eager_imports():
        if device.type == "cpu":
            megatron_cpu.apply(pipelines=not with_deepspeed)
        from megatron.core import parallel_state
        from megatron.core.models import gpt  # noqa: F401 - without its compiler, as below

    if with_deepspeed:
        _init_deepspeed(device, backend)
    else:
        torch.distributed.init_process_group(backend)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=point.tp,
        pipeline_model_parallel_size=point.pp,
        create_gloo_process_groups=False,
    )
    seed_everything(point.seed + SEED_STEP * parallel_state.get_pipeline_model_parallel_rank())
    yield device
    torch.distributed.barrier()
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


def _init_deepspeed(device: torch.device, backend: str) -> None:
    os.environ["DS_ACCELERATOR"] = device.type
    # DeepSpeed calls a name that newer torch renames; one warning a bucket would fill the log.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    remember_cpu_info()
    with eager_imports():
        importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
    spare_garbage_collector()
    import deepspeed

    deepspeed.utils.logging.set_log_level_from_string("info")
    if device.type == "cpu":
        leave_shm_out()
    deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False)


def seed_everything(seed: int) -> None:
    """Make weights and order the same in every run and for every data-parallel degree."""
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)


def choose_device(point: Point, ranks: Ranks) -> torch.device:
    """Take this rank's CUDA device, or the CPU.

    On CUDA, kernels are chosen that give the same bits in every run, since engines are compared bit
    by bit; an operation without such a kernel raises torch's ``RuntimeError``, which names it.

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
    # Before the first matrix product.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Not warn_only: attention's backward would warn, and add in whatever order its blocks end.
    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.enable_cudnn_sdp(False)  # so that it is flash attention everywhere
    # The flag would also fill every new buffer with NaN, which costs time and protects nothing.
    deterministic: Any = torch.utils.deterministic
    deterministic.fill_uninitialized_memory = False
    return device


@contextlib.contextmanager
def eager_imports() -> Iterator[None]:
    """Import libraries without their ``torch.compile`` decorators.

    They belong to megatron-core's fusions and to DeepSpeed's Muon, neither of which this trainer
    uses, yet decorating loads torch's compiler: about two seconds a process.
    """

    def as_it_is(model: Callable[..., Any] | None = None, **_options: object) -> Any:
        return (lambda function: function) if model is None else model

    compiler = torch.compile
    torch.compile = as_it_is
    try:
        yield
    finally:
        torch.compile = compiler


def remember_cpu_info() -> None:
    """Ask for the processor's name and flags once.

    DeepSpeed asks three times while it loads CPUAdam, and each answer starts processes for a
    second.
    """
    cpuinfo: Any = importlib.import_module("cpuinfo")
    if not hasattr(cpuinfo.get_cpu_info, "cache_info"):
        cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)


def leave_shm_out() -> None:
    """Keep DeepSpeed from compiling an op for minutes; gloo does the few collectives there are."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def spare_garbage_collector() -> None:
    """Take everything made so far out of the garbage collector's sight.

    DeepSpeed's ``memory_breakdown`` collects garbage six times a micro-batch; going through every
    module and function each time costs a quarter of a second a collection.
    """
    gc.collect()
    gc.freeze()


@contextlib.contextmanager
def plugin_installed(run: RunFile) -> Iterator[None]:
    """Install ``deep_optimizer_states`` before DeepSpeed reads its config, or leave it stock.

    Raises:
        ConfigError: the package cannot be imported, or refuses the settings, this DeepSpeed or
            this machine; inside the context too.
    """
    if not run.uses_plugin:
        yield
        return
    try:
        import deep_optimizer_states as plugin
    except ImportError as error:
        raise ConfigError(
            f"ds_config.json enables deep_optimizer_states, which cannot be imported ({error}); "
            "run 'make setup'"
        ) from None
    try:
        plugin.install()
        yield
    except (plugin.ConfigError, plugin.UnsupportedDeepSpeedError, plugin.KernelError) as error:
        raise ConfigError(f"deep_optimizer_states: {error}") from None
