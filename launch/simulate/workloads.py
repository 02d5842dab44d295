"""Points of the harness as workloads of the performance model."""

from __future__ import annotations

import enum
from typing import Any

from configs.schema import Point
from configs.templates import filled
from deep_optimizer_states.predict.model import model_from_table
from deep_optimizer_states.predict.workload import Workload, WorkloadError
from launch.ds_json import deepspeed_config

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
    "vanilla": "zero3-0.13",
    "async-gradients": "async-0.13",
    "hybrid": "paper",
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
        model=model_from_table(point.model.model_dump()),
        dp=point.dp,
        tp=point.tp,
        micro_batch_size=point.micro_batch_size,
        accumulation=point.accumulation,
        offload_ratio=point.values.get("offload_ratio", 1.0),
        subgroup_numel=point.values.get("subgroup_numel", 1_000_000_000),
        activation_checkpointing=point.activation_checkpointing,
        materialized_attention=point.attention == "local",
        hog_share=_taken_share(point),
        **_engine_fields(point, when),
    )


def _taken_share(point: Point) -> float:
    """Share of each device's time that companions take."""
    rows = point.study.companions.values() if point.study else ()
    return sum(float(filled(row.device_share, point.values) or 0.0) for row in rows)


def _engine_fields(point: Point, when: AsOf) -> dict[str, Any]:
    block = deepspeed_config(point).get("deep_optimizer_states", {})
    stride = {"stride": block["stride"]} if "stride" in block else {}
    if when is AsOf.PAPER:
        if point.engine not in _PAPER_ENGINES:
            raise WorkloadError(f"engine {point.engine!r}: the paper's software has no such engine")
        return {"engine": _PAPER_ENGINES[point.engine], **stride}
    if not block:
        return {"engine": "zero3"}
    just_in_time = block["just_in_time_forward"]
    policy = block["policy"]
    return {"engine": "ours", "policy": policy, "just_in_time_forward": just_in_time, **stride}
