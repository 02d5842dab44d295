"""The pipeline's optimizer: AdamW over a rank's parameters, clipped by the whole model's norm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from configs.schema import Point
from launch.trainer.loop import learning_rate
from optimus_cc.gradients import gradient_of


class Optimizer:
    """Updates fp32 master weights, which are the parameters themselves in an fp32 model.

    Gradients are those that every rank has after the reduction.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        point: Point,
        model_group: dist.ProcessGroup,
        *,
        is_first_shard: bool,
    ) -> None:
        """Make the master weights.

        Args:
            parameters: of this rank, by the names they are saved under.
            point: learning rate, Adam's numbers and clipping.
            model_group: the ranks that hold one model, over TP and PP.
            is_first_shard: this rank counts what every tensor-parallel rank holds.
        """
        self._names = list(parameters)
        self._parameters = list(parameters.values())
        self._point = point
        self._group = model_group
        self._counted = [_is_counted(p, is_first_shard) for p in self._parameters]
        self._masters = [
            p if p.dtype == torch.float32 else torch.nn.Parameter(p.detach().float())
            for p in self._parameters
        ]
        self._adam = torch.optim.AdamW(
            self._masters,
            lr=point.lr,
            betas=(point.adam_beta1, point.adam_beta2),
            eps=point.adam_eps,
            weight_decay=point.weight_decay,
        )

    @torch.no_grad()
    def step(self, iteration: int) -> float:
        """Update with the gradients, clipped; not at all where their norm is not finite.

        Args:
            iteration: from 1, which decides the learning rate.

        Returns:
            The norm of the whole model's gradient before clipping, the same on every rank of it.
        """
        gradients = [gradient_of(p).float() for p in self._parameters]
        counted = (g for g, counts in zip(gradients, self._counted, strict=True) if counts)
        squares = [g.square().sum(dtype=torch.float64) for g in counted]
        nothing = gradients[0].new_zeros((), dtype=torch.float64)
        total = torch.stack(squares).sum() if squares else nothing
        dist.all_reduce(total, group=self._group)
        norm = float(total.sqrt())
        if not torch.isfinite(total):
            return norm
        limit = self._point.clip_grad
        scale = min(1.0, limit / (norm + 1e-6)) if limit else 1.0
        for parameter, master, gradient in zip(
            self._parameters, self._masters, gradients, strict=True
        ):
            parameter.grad = None
            master.grad = gradient.mul_(scale)
        for group in self._adam.param_groups:
            group["lr"] = learning_rate(self._point, iteration)
        self._adam.step()
        self._adam.zero_grad()
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            if master is not parameter:
                parameter.copy_(master)
        return norm

    @property
    def state(self) -> list[torch.Tensor]:
        """Master weights and moments, in the parameters' order."""
        moments = [self._adam.state[m].get(key) for m in self._masters for key in _MOMENTS]
        return [m.detach() for m in self._masters] + [m for m in moments if m is not None]

    def state_dict(self) -> dict[str, Any]:
        """Master weights and moments, to go on as if training had not stopped."""
        masters = (master.detach() for master in self._masters)
        named = dict(zip(self._names, masters, strict=True))
        return {"masters": named, "adam": self._adam.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave, the parameters included."""
        for name, parameter, master in zip(
            self._names, self._parameters, self._masters, strict=True
        ):
            saved = state["masters"][name]
            master.copy_(saved)
            parameter.copy_(saved)
        self._adam.load_state_dict(state["adam"])


_MOMENTS = ("exp_avg", "exp_avg_sq")


def _is_counted(parameter: torch.nn.Parameter, is_first_shard: bool) -> bool:
    """Whether a parameter belongs to the norm on this rank: every one counts once.

    Of the two copies of a tied embedding megatron-core marks the last stage's as ``shared``; what
    is not split over the tensor-parallel ranks counts on the first of them.
    """
    if getattr(parameter, "shared", False):
        return False
    return is_first_shard or getattr(parameter, "tensor_model_parallel", False)
