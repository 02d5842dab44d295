"""Deep Optimizer States: interleaved optimizer offload for stock DeepSpeed at ZeRO-1, 2 and 3.

Call :func:`install` once before ``deepspeed.initialize``; a DeepSpeed config that holds an enabled
``"deep_optimizer_states"`` block then gets this package's optimizer, every other one stays stock.
"""

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

__version__ = "0.1.0"

__all__ = [
    "ConfigError",
    "DeepOptimizerStatesError",
    "HostMemoryError",
    "KernelError",
    "PlanError",
    "UnsupportedDeepSpeedError",
    "UpdateError",
    "install",
    "uninstall",
]
