"""Stock's ZeRO-3 optimizer with the methods of DeepSpeed 0.19, in each release that is supported.

Releases from 0.19 on have them. For those before it a subclass adds what they lack, so that the
rest of this package knows one stock only. It changes nothing that stock itself computes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from deepspeed import comm as dist
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3


class ZeroOptimizerBefore019(DeepSpeedZeroOptimizer_Stage3):
    """Stock's optimizer of a release before 0.19, which knows fewer groups and ends of windows."""

    _offload_boundary_param_ids: set[int]
    dp_process_group: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._offload_boundary_param_ids = set()
        self._ends_window = True
        super().__init__(*args, **kwargs)

    @property
    def is_gradient_accumulation_boundary(self) -> Callable[[], bool]:
        """What is a method since 0.19; before, the engine and stock assign a truth value to it."""
        return lambda: self._ends_window

    @is_gradient_accumulation_boundary.setter
    def is_gradient_accumulation_boundary(self, ends_window: bool) -> None:
        self._ends_window = ends_window

    def _pre_step(self) -> None:
        super()._pre_step()
        self._offload_boundary_param_ids = set()

    # Experts may be spread over other ranks than the rest since 0.19; before, all of a kind.

    def _get_param_partition_group(self, _param: Any) -> Any:
        return self.dp_process_group

    def _get_param_partition_rank(self, _param: Any) -> int:
        return int(dist.get_rank(group=self.dp_process_group))

    def _autoep_expert_parallel_group(self, _params: Any) -> None:
        return None


def has_methods_of_0_19() -> bool:
    """Whether this DeepSpeed's optimizer is of 0.19 or newer."""
    return hasattr(DeepSpeedZeroOptimizer_Stage3, "finalize_gradient_accumulation_boundary")


StockZeroOptimizer: Any = (
    DeepSpeedZeroOptimizer_Stage3 if has_methods_of_0_19() else ZeroOptimizerBefore019
)
"""What our optimizer overrides."""
