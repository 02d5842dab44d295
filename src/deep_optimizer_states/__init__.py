"""Deep Optimizer States: interleaved optimizer offload for stock DeepSpeed ZeRO-3.

Call :func:`install` once before ``deepspeed.initialize``; a DeepSpeed config that holds an enabled
``"deep_optimizer_states"`` block then gets this package's optimizer, every other one stays stock.
"""

from deep_optimizer_states.config import Settings
from deep_optimizer_states.errors import (
    ConfigError,
    DeepOptimizerStatesError,
    HostMemoryError,
    KernelError,
    PlanError,
    UnsupportedDeepSpeedError,
    UpdateError,
)
from deep_optimizer_states.install import install, uninstall

__all__ = [
    "ConfigError",
    "DeepOptimizerStatesError",
    "HostMemoryError",
    "KernelError",
    "PlanError",
    "Settings",
    "UnsupportedDeepSpeedError",
    "UpdateError",
    "install",
    "uninstall",
]
