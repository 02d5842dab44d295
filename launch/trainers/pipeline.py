"""The harness's trainer with a pipeline: megatron-core's GPT over TP, PP and DP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from configs.schema import Point
from launch.ds_json import deepspeed_config
from launch.trainers.own import OwnTrainer

MODULE = "launch.trainer.pipeline.pretrain_gpt"
COMPRESSION = "optimus_cc"
"""Key of ``ds_config.json`` that holds what is compressed."""
_KEPT = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "zero_optimization",
    COMPRESSION,
)
"""What of a run's ``ds_config.json`` means something without DeepSpeed."""


@dataclass(frozen=True)
class PipelineTrainer(OwnTrainer):
    """megatron-core's GPT over stages, shards and replicas, whose communication may be compressed.

    There is no DeepSpeed: optimizer state is on the device of the rank, whole.
    """

    name: ClassVar[str] = "megatron-pipeline"
    default_module: ClassVar[str] = MODULE
    module: str = MODULE

    def refuse(self, point: Point) -> list[str]:
        """Why this trainer cannot run a point."""
        needed = {"zero_stage": 0, "offload_optimizer": "none", "offload_param": "none"}
        reasons = [
            f"{name} = {getattr(point, name)!r}: --trainer {self.name} runs without DeepSpeed; "
            f"give {name} = {value!r}"
            for name, value in needed.items()
            if getattr(point, name) != value
        ]
        if self.user_json is not None:
            reasons.append(
                f"--deepspeed-config {self.user_json}: --trainer {self.name} runs without "
                "DeepSpeed; leave it out"
            )
        if point.dtype == "fp16":
            reasons.append(
                f"dtype = 'fp16': --trainer {self.name} has no loss scale; give 'bf16' or 'fp32'"
            )
        if point.dtype == "bf16" and point.grad_accum_dtype == "fp32":
            reasons.append(
                f"grad_accum_dtype = 'fp32': --trainer {self.name} sums a bf16 model's gradients "
                "in bf16; give grad_accum_dtype = 'bf16', or dtype = 'fp32'"
            )
        if point.model.layers < point.pp:
            reasons.append(
                f"pp = {point.pp}: a stage needs a layer, and the model has {point.model.layers}; "
                "give a smaller pp"
            )
        return [*reasons, *self._cannot_continue(point)]

    def _cannot_continue(self, point: Point) -> list[str]:
        """Queries and errors of the compression belong to the engine that made them."""
        if self.checkpoint is None:
            return []
        saved = self.checkpoint.point.get("engine")
        other = (
            f"engine = {point.engine!r}: the checkpoint {self.checkpoint.path} was saved with "
            f"{saved!r}; give that, or begin without a checkpoint"
        )
        return [*([other] if saved != point.engine else []), *self.checkpoint.differences(point)]

    def ds_config(self, point: Point) -> dict[str, Any]:
        """What of DeepSpeed's config the program reads: batch sizes and compression."""
        config = deepspeed_config(point)
        return {key: config[key] for key in _KEPT if key in config}
