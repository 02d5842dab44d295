"""Optimus-CC: compressed communication for 3D-parallel training.

After Song et al., "Optimus-CC" (ASPLOS '23). Three schemes, each of them a setting:

- **CB** sends activation gradients between pipeline stages as low-rank pairs, all of them or those
  of the epilogue, with lazy error propagation or without (:mod:`optimus_cc.backpropagation`).
- **FE** reduces a tied embedding's gradient once (:mod:`optimus_cc.gradients`).
- **SC** reduces the gradients of the first stages by PowerSGD (:mod:`optimus_cc.selective`).

They run on ``torch.distributed.pipelining`` (:mod:`optimus_cc.pipelining`) and on megatron-core
(:mod:`optimus_cc.megatron`, the only module that needs more than torch).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from optimus_cc.settings import Settings, SettingsError, add_arguments, from_arguments

if TYPE_CHECKING:
    from optimus_cc.gradients import GradientReduction, Stage
    from optimus_cc.traffic import COMPRESSION, Kind, Traffic

__all__ = [
    "COMPRESSION",
    "GradientReduction",
    "Kind",
    "Settings",
    "SettingsError",
    "Stage",
    "Traffic",
    "add_arguments",
    "from_arguments",
]


def __getattr__(name: str) -> Any:
    # Imported on first use, so that predictions need no torch.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "gradients" if name in ("GradientReduction", "Stage") else "traffic"
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)
