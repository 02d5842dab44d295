"""What the shared objects read of DeepSpeed's optimizer, at any stage."""

from __future__ import annotations

from typing import Any, Protocol

import torch


class AnyStock(Protocol):
    """The attributes of DeepSpeed's optimizer that the shared objects read, and no others."""

    optimizer: Any
    """The ``DeepSpeedCPUAdam``: its state by master weight, and its parameter groups."""
    dtype: torch.dtype
    """Type of the model's weights."""
    master_weights_and_grads_dtype: torch.dtype
    """Type of master weights, and of the gradients that stock updates them with."""
    dp_process_group: Any
    model_parallel_group: Any
