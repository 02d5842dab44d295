"""Lightning's strategies as data: none, DeepSpeed with a config, and the same without a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    SingleDeviceStrategy,
    Strategy,
)


class CpuDeepSpeedStrategy(DeepSpeedStrategy):
    """Lightning's strategy for machines without a GPU.

    Lightning refuses DeepSpeed there and reads CUDA's device indices; DeepSpeed itself can do
    without. Where there is a GPU, the strategy of Lightning itself is to be used.
    """

    @property
    def root_device(self) -> torch.device:
        """The CPU, with an index because DeepSpeed asks for one."""
        return torch.device("cpu", self.local_rank)

    def setup_environment(self) -> None:
        """Set up as without DeepSpeed, whose check for CUDA is left out."""
        DDPStrategy.setup_environment(self)

    def setup_distributed(self) -> None:
        """Meet the other ranks; the indices of CUDA devices are not looked at."""
        import deepspeed

        # Compiling it takes minutes, and gloo does the few collectives there are.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        self.set_world_ranks()
        self._init_deepspeed_distributed()


def strategy_of(config: Mapping[str, Any] | None, *, on_gpu: bool, num_ranks: int) -> Strategy:
    """What Lightning's ``Trainer`` gets as its strategy.

    Args:
        config: DeepSpeed's; None or empty to train without DeepSpeed.
        on_gpu: whether the model lives on GPUs.
        num_ranks: processes of the run.
    """
    if config:
        kind = DeepSpeedStrategy if on_gpu else CpuDeepSpeedStrategy
        return kind(config=dict(config))
    if num_ranks == 1:
        return SingleDeviceStrategy("cuda:0" if on_gpu else "cpu")
    return DDPStrategy(process_group_backend="nccl" if on_gpu else "gloo")


def offloads_optimizer(config: Mapping[str, Any] | None) -> bool:
    """Whether a DeepSpeed config keeps the optimizer's state in host memory."""
    zero = (config or {}).get("zero_optimization", {})
    return bool(zero.get("offload_optimizer", {}).get("device", "none") != "none")
