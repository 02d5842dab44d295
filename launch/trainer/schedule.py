"""The learning rate (linear warm-up, then half a cosine), and what iterations are followed by."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from configs.schema import Point

if TYPE_CHECKING:
    from torch.optim import Optimizer


def evaluates_after(point: Point, iteration: int) -> bool:
    """Whether an evaluation is due."""
    return point.eval_interval > 0 and iteration % point.eval_interval == 0


def saves_after(point: Point, iteration: int) -> bool:
    """Whether a checkpoint is due: at every interval, and where there is one also at the end."""
    is_last = iteration == point.iterations
    return point.save_interval > 0 and (is_last or iteration % point.save_interval == 0)


def learning_rate(point: Point, iteration: int) -> float:
    """Rate that ``iteration`` (from 1) is updated with.

    Megatron's formula over iterations: with ``lr_warmup_iterations`` 1 the first iteration has the
    peak, and the last one ``min_lr``.
    """
    warmup, last = point.lr_warmup_iterations, point.iterations
    if warmup > 0 and iteration <= warmup:
        return point.lr * iteration / warmup
    if iteration > last:
        return point.min_lr
    share = (iteration - warmup) / (last - warmup)
    return point.min_lr + (point.lr - point.min_lr) * 0.5 * (math.cos(math.pi * share) + 1.0)


class CosineSchedule:
    """Sets the optimizer's rate before the first iteration and after every update.

    DeepSpeed calls ``step`` after an update that it did not skip, so a skipped iteration is
    repeated at the same rate.
    """

    def __init__(self, optimizer: Optimizer, point: Point) -> None:
        self._optimizer = optimizer
        self._point = point
        self._iteration = 1
        self._apply()

    @property
    def current(self) -> float:
        """Rate of the coming update."""
        return learning_rate(self._point, self._iteration)

    def step(self) -> None:
        """Go to the next iteration's rate."""
        self._iteration += 1
        self._apply()

    def get_last_lr(self) -> list[float]:
        """Rates of the parameter groups, as torch's schedulers give them."""
        return [float(group["lr"]) for group in self._optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint."""
        return {"iteration": self._iteration}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a checkpoint's state."""
        self._iteration = int(state["iteration"])
        self._apply()

    def _apply(self) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = self.current
