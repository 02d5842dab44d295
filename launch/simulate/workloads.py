"""Points of the harness as workloads of the performance model."""

from __future__ import annotations

import enum
from typing import Any

from configs.schema import Engine, Point
from deep_optimizer_states.predict.model import model_from_table
from deep_optimizer_states.predict.workload import Workload

PAPER_MACHINES = ("a100x4", "h100x4")
"""Profiles fitted to the paper's figures, and so to its software."""


class AsOf(enum.StrEnum):
    """Whose software a point's engine stands for."""

    PAPER = "paper"
    """The authors' fork of DeepSpeed 0.13."""
    TODAY = "today"
    """What the harness runs: stock DeepSpeed, and this plugin."""

    @property
    def words(self) -> str:
        """For reports."""
        return _WORDS[self]


_WORDS = {
    AsOf.PAPER: "the paper's DeepSpeed 0.13 and its plugin",
    AsOf.TODAY: "today's DeepSpeed and this plugin",
}
_PAPER_ENGINES = {
    Engine.VANILLA: "zero3-0.13",
    Engine.ASYNC_GRADIENTS: "async-0.13",
    Engine.HYBRID: "paper",
}


def as_of(word: str | None, machine: str) -> AsOf:
    """What was asked for, or else what a machine's rates were fitted to."""
    if word is not None:
        return AsOf(word)
    return AsOf.PAPER if machine in PAPER_MACHINES else AsOf.TODAY


def workload_of(point: Point, when: AsOf) -> Workload:
    """The workload that a point is.

    Raises:
        WorkloadError: The performance model does not know such a run.
    """
    return Workload(
        model=model_from_table(point.model.model_dump(exclude={"architecture"})),
        dp=point.dp,
        tp=point.tp,
        micro_batch_size=point.micro_batch_size,
        accumulation=point.accumulation,
        offload_ratio=point.offload_ratio,
        subgroup_numel=point.subgroup_numel,
        activation_checkpointing=point.activation_checkpointing,
        materialized_attention=point.attention == "local",
        hog_share=point.hog_share,
        **_engine_fields(point, when),
    )


def _engine_fields(point: Point, when: AsOf) -> dict[str, Any]:
    stride = {"stride": point.stride} if point.engine is Engine.HYBRID else {}
    if when is AsOf.PAPER:
        return {"engine": _PAPER_ENGINES[point.engine], **stride}
    if point.engine is Engine.VANILLA:
        return {"engine": "zero3"}
    # As the harness runs them: the update ends before the next forward begins.
    policy = "stride" if point.engine is Engine.HYBRID else "all-host"
    return {"engine": "ours", "policy": policy, "just_in_time_forward": False, **stride}
