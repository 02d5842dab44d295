"""Deep Optimizer States: interleaved optimizer offload for stock DeepSpeed at ZeRO-1, 2 and 3.

Call :func:`install` once before ``deepspeed.initialize``; a DeepSpeed config that holds an enabled
``"deep_optimizer_states"`` block then gets this package's optimizer, every other one stays stock.
"""

from typing import TYPE_CHECKING

from deep_optimizer_states.adapter.hooks import install, uninstall
from deep_optimizer_states.errors import (
    ConfigError,
    DeepOptimizerStatesError,
    HostMemoryError,
    KernelError,
    PlanError,
    UnsupportedDeepSpeedError,
    UpdateError,
)

if TYPE_CHECKING:
    from deep_optimizer_states.config import Settings

__version__ = "0.1.0"

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


def __getattr__(name: str) -> object:
    """Import ``Settings`` when it is asked for: it needs pydantic, which the package does not."""
    if name == "Settings":
        from deep_optimizer_states.config import Settings

        return Settings
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
